"""Confidence pruning: nodes that the drafter itself does not believe in are not verified."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array

from spec_jax.control.budget import path_probability
from spec_jax.tree import Draft
from spec_jax.verify.verdict import Verdict


@dataclasses.dataclass(frozen=True)
class Confident:
    """The narrowest width that holds every node, of any running row, whose path the drafter gives at least `least`.

    A chain is cut at its first doubtful token; a tree, whose nodes stand in descending order of chance, at its first
    doubtful node. As SpecLA prunes what a recurrent verifier would have to carry; no time is measured for it.
    """

    least: float = 0.1
    uses_cost = False

    def __post_init__(self) -> None:
        """Check the threshold."""
        if not 0 < self.least <= 1:
            raise ValueError(f"least: got {self.least!r}, takes a chance above 0, at most 1")

    def init(self, batch: int) -> tuple[()]:
        """No state."""
        return ()

    def decide(self, state: tuple[()], draft: Draft, active: Array, cost: Array, widths: tuple[int, ...]) -> Array:
        """The index of the width.

        Raises:
            ValueError: for a draft drawn from a law: cutting it by confidences that may follow its tokens would bias
                what the p/q rules emit.
        """
        if draft.proposal not in ("point", "coupled"):
            raise ValueError(
                f"controller: got Confident with a {draft.proposal!r} draft, takes 'point' or 'coupled' ones; use "
                "Always for drafts that the p/q rules verify"
            )
        n = draft.tree.valid.shape[-1]
        worth = draft.tree.valid & (path_probability(draft) >= self.least) & active[:, None]
        need = jnp.max(jnp.where(worth, jnp.arange(1, n + 1), 1))
        return (jnp.asarray(widths) < need).sum(dtype=jnp.int32)

    def observe(self, state: tuple[()], draft: Draft, width: Array, verdict: Verdict, active: Array) -> tuple[()]:
        """No state."""
        return state
