"""A budget that maximises tokens per second: expected tokens of a width over what the width costs."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from spec_jax import tree as trees
from spec_jax.checks import check_sizes
from spec_jax.control.budget import path_probability
from spec_jax.tree import Draft
from spec_jax.verify.verdict import Verdict

_LOWEST, _HIGHEST = -2.5, 4.5


@flax.struct.dataclass
class Calibration:
    """Per bin of confidence, the decayed number of nodes whose parent was accepted, and how many were accepted too."""

    seen: Float[Array, "bins"]
    accepted: Float[Array, "bins"]


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Verifies the width with the most expected tokens per unit of cost, summed over the batch's running rows.

    A node's chance is the product of calibrated confidences on its root path. Calibration is learned in the run,
    shared by all rows: a bin of confidence holds how often nodes of that confidence were accepted, weighed against
    the drafter's own estimate, which counts as `prior` nodes. A node teaches once its parent is accepted, whether it
    was verified or not, since the emitted token tells what the target wanted there. So a drafter that was given up on
    can be taken up again.

    Attributes:
        prior: weight of the drafter's own estimate, in nodes.
        decay: what is left of old counts after a round.
        bins: bins of confidence, evenly spaced in its log-odds.
    """

    prior: float = 16.0
    decay: float = 0.995
    bins: int = 8

    uses_cost = True

    def __post_init__(self) -> None:
        """Check the settings."""
        if not self.prior > 0:
            raise ValueError(f"prior: got {self.prior!r}, takes a number above 0")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay: got {self.decay!r}, takes a number in (0, 1]")
        check_sizes(self, bins=1)

    def init(self, batch: int) -> Calibration:
        """Nothing seen."""
        return Calibration(jnp.zeros(self.bins), jnp.zeros(self.bins))

    def decide(
        self,
        state: Calibration,
        draft: Draft,
        active: Bool[Array, "b"],
        cost: Float[Array, "w"],
        widths: tuple[int, ...],
    ) -> Int[Array, ""]:
        """The index of the best width; the narrowest of equals. Raises ValueError as `chance` does."""
        chance = self.chance(state, draft)
        gained = jnp.cumsum(jnp.where(active[:, None], chance, 0.0).sum(0))
        return jnp.argmax(gained[jnp.asarray(widths) - 1] / cost).astype(jnp.int32)

    def chance(self, state: Calibration, draft: Draft) -> Float[Array, "b n"]:
        """The calibrated chance of every node's root path.

        Raises:
            ValueError: for a draft drawn from a law: cutting it by confidences that may follow its tokens would bias
                what the p/q rules emit.
        """
        if draft.proposal not in ("point", "coupled"):
            raise ValueError(
                f"controller: got {type(self).__name__} with a {draft.proposal!r} draft, takes 'point' or 'coupled' "
                "ones; use Always for drafts that the p/q rules verify"
            )
        return path_probability(dataclasses.replace(draft, confidence=self.calibrated(state, draft.confidence)))

    def observe(
        self, state: Calibration, draft: Draft, width: Int[Array, ""], verdict: Verdict, active: Bool[Array, "b"]
    ) -> Calibration:
        """The counts after a round."""
        known, accepted = jax.vmap(_outcomes, (0, None, 0))(draft.tree, width, verdict)
        bins = self._bin(draft.confidence)
        known = known & active[:, None]
        add = lambda old, these: old * self.decay + jnp.zeros(self.bins).at[bins].add(these)  # noqa: E731
        return Calibration(add(state.seen, known * 1.0), add(state.accepted, (known & accepted) * 1.0))

    def calibrated(self, state: Calibration, confidence: Float[Array, "*n"]) -> Float[Array, "*n"]:
        """The drafter's confidence, corrected by what became of such nodes."""
        bins = self._bin(confidence)
        return (state.accepted[bins] + self.prior * confidence) / (state.seen[bins] + self.prior)

    def middles(self) -> Float[np.ndarray, "bins"]:
        """The confidence in the middle of each bin."""
        odds = _LOWEST + (np.arange(self.bins) + 0.5) * (_HIGHEST - _LOWEST) / self.bins
        return (1 / (1 + np.exp(-odds))).astype(np.float32)

    def _bin(self, confidence: Array) -> Array:
        p = jnp.clip(confidence, 1e-3, 1 - 1e-3)
        odds = (jnp.log(p / (1 - p)) - _LOWEST) / (_HIGHEST - _LOWEST)
        return jnp.clip(jnp.floor(odds * self.bins), 0, self.bins - 1).astype(jnp.int32)


def _outcomes(tree: trees.Tree, width: Array, verdict: Verdict) -> tuple[Array, Array]:
    """Of one row: which nodes' fate is known, and which of them were accepted (unverified: were what was emitted)."""
    index, step = jnp.arange(tree.parent.shape[0]), jnp.arange(verdict.path.shape[0])
    on_path = ((index[:, None] == verdict.path) & (step <= verdict.accepted)).any(-1)
    known = (tree.parent >= 0) & tree.valid & on_path[jnp.maximum(tree.parent, 0)]
    wanted = verdict.tokens[jnp.clip(trees.depth(tree.parent) - 1, 0, verdict.tokens.shape[0] - 1)]
    return known, jnp.where(index < width, on_path, tree.tokens == wanted)
