"""A training objective: weights x mask x divergence, over all slots of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float

from spec_jax.checks import check_number
from spec_jax.train import divergence, weights
from spec_jax.train.slots import Said, Slots
from spec_jax.train.tables import of_mapping

Metrics = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Objective:
    """Sum of weight x divergence over the scored slots, divided by what `per` says (0 if nothing counts).

    Attributes:
        divergences: (name, factor) pairs; names are "ce" (needs labels alone) and those of `divergence.NAMES`. DSpark
            is (("ce", 0.1), ("l1", 0.9)) with decay 4 and confidence 1; PARD-2 is (("ce", 0.1), ("forward_kl", 1.0)).
        weights: (name, settings) pairs of `weights.NAMES`, which multiply, and with them the texts' own.
        per: what the sum is divided by. "weight": the weights of the scored slots (DFlash). "slot": their number.
            "block": the number of blocks with a scored slot (D-PACE).
        confidence: factor of the confidence head's loss, cross-entropy to 1 - TV(p, q) (DSpark, arXiv 2607.05147),
            under the weights that do not depend on what was said.
        base_until: Domino's curriculum (arXiv 2605.29707): the loss is (1 - w) x that of the logits + w x that of the
            backbone's, w falling in a straight line from 1 to 0 over this part of the training; None trains the logits
            alone.
        regression: factor of the distance between the drafter's hidden states and the target's, under the same weights
            (EAGLE-1, arXiv 2401.15077: 1, beside 0.1 of the cross-entropy).
        tree: factor of group tree optimisation's surrogate (GTO; see `tree_loss`), which `Task` adds: it costs a target
            pass over all trees, with a reference two.
        tree_nodes, tree_children: size of those trees, and the tokens of each slot that they combine.
    """

    divergences: tuple[tuple[str, float], ...] = (("ce", 1.0),)
    weights: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()
    per: str = "weight"
    confidence: float = 0.0
    base_until: float | None = None
    regression: float = 0.0
    tree: float = 0.0
    tree_nodes: int = 16
    tree_children: int = 4

    def __post_init__(self) -> None:
        """Check names and settings."""
        if not self.divergences:
            raise ValueError("divergences: got none, takes at least one")
        for name, factor in self.divergences:
            if name != "ce" and name not in divergence.NAMES:
                raise ValueError(f"divergences: got {name!r}, takes some of ce, {', '.join(divergence.NAMES)}")
            check_number(f"divergences.{name}", factor, 0.0)
        for name, settings in self.weights:
            weights.named(name, dict(settings))
        if self.per not in ("weight", "slot", "block"):
            raise ValueError(f"per: got {self.per!r}, takes 'weight', 'slot' or 'block'")
        for name, least in (("tree_nodes", 2), ("tree_children", 1)):
            check_number(name, getattr(self, name), least, integer=True)
        for name in ("confidence", "regression", "tree"):
            check_number(name, getattr(self, name), 0.0)
        if self.base_until is not None:
            check_number("base_until", self.base_until, 0.0, 1.0, open_low=True)
        if not any(factor for _, factor in self.divergences) and not self.regression and not self.tree:
            raise ValueError(f"divergences: got {dict(self.divergences)}, takes a factor over 0, regression or tree")

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Objective:
        """From a table of a configuration file: divergences = {ce = 1.0}, weights = {decay = {gamma = 4.0}}."""
        known = {f.name for f in dataclasses.fields(cls)}
        given = of_mapping("objective", settings)
        if unknown := set(given) - known:
            raise ValueError(f"objective: got {sorted(unknown)}, takes some of {sorted(known)}")
        if "divergences" in given:
            given["divergences"] = tuple(of_mapping("divergences", given["divergences"]).items())
        if "weights" in given:
            named = of_mapping("weights", given["weights"]).items()
            given["weights"] = tuple(
                (name, tuple(sorted(of_mapping(f"weights.{name}", s).items()))) for name, s in named
            )
        return cls(**given)

    @property
    def needs_law(self) -> bool:
        """Whether the target's logits are looked at, and not labels alone."""
        laws = {"expected", "survival", "hard_survival"}
        return (
            self.confidence > 0
            or any(name != "ce" for name, _ in self.divergences)
            or any(name in laws for name, _ in self.weights)
        )

    def __call__(self, slots: Slots, said: Said, done: Float[Array, ""] | float = 0.0) -> tuple[Array, Metrics]:
        """The loss of a batch, and its parts.

        A head that scores some candidates alone says nothing of other tokens; where the label is one of these, the
        logits under the head count in its place.

        Args:
            slots: what was said beside what was right (see `Slots.of`); `said.logits` are those of `slots`.
            said: for the parts beside the logits: the backbone's logits and the confidence.
            done: the part of the training that is done, 0 .. 1, for the curriculum.
        """
        slots = slots if said.base is None else slots.backed(said.base)
        total = self.of_slots(slots)
        metrics: Metrics = {"draft_loss": total}
        if self.base_until is not None:
            if said.base is None:
                raise ValueError("base_until: got a drafter without a head, takes one with logits under it")
            base, share = self.of_slots(slots.over(said.base)), jnp.maximum(0.0, 1 - done / self.base_until)
            total = (1 - share) * total + share * base
            metrics |= {"base_loss": base, "base_share": jnp.asarray(share, jnp.float32)}
        fixed = tuple(w for w in self.weights if w[0] in ("decay", "powers"))
        if self.confidence > 0:
            if said.confidence is None:
                raise ValueError("confidence: got a drafter without a confidence head, takes one that has it")
            part = self._mean(confidence_loss(slots, said.confidence), slots, fixed)
            total += self.confidence * part
            metrics["confidence_loss"] = part
        if self.regression > 0:
            if said.regression is None:
                raise ValueError("regression: got a drafter whose hidden states stand for nothing, takes an EAGLE head")
            part = self._mean(said.regression, slots, fixed)
            total += self.regression * part
            metrics["regression_loss"] = part
        return total, {"loss": total} | metrics

    def of_slots(self, slots: Slots) -> Float[Array, ""]:
        """Weights x mask x divergence alone."""
        nats = jnp.zeros(slots.labels.shape)
        for name, factor in self.divergences:
            if name == "ce":
                nats += factor * divergence.cross_entropy(slots.logits, slots.labels)
            else:
                nats += factor * divergence.NAMES[name](slots.logits, slots.law)
        return self._mean(nats, slots, self.weights)

    def _mean(self, nats: Array, slots: Slots, terms: tuple) -> Array:
        weight = slots.scored.astype(jnp.float32)
        if slots.weight is not None:
            weight *= slots.weight[..., None]
        for name, settings in terms:
            weight *= weights.named(name, dict(settings))(slots)
        weight = lax.stop_gradient(weight)
        blocks = slots.scored.any(-1)
        count = {"weight": weight, "slot": slots.scored, "block": blocks}[self.per].sum()
        total = jnp.where(weight > 0, weight * nats, 0.0).sum()
        return total / jnp.where(count > 0, count, 1)


def confidence_loss(slots: Slots, logits: Float[Array, "*b k"]) -> Float[Array, "*b k"]:
    """Binary cross-entropy of a confidence head to the chance of acceptance, 1 - TV(p, q), held fixed (DSpark)."""
    return optax.sigmoid_binary_cross_entropy(jnp.where(slots.scored, logits, 0.0), slots.overlap())


def accuracy(slots: Slots) -> Metrics:
    """Figures of a batch: how often each slot's likeliest token is right, and the mean number right in a row.

    right_k is over blocks whose slot k is scored; in_a_row counts slots before the first miss, over blocks with any.
    """
    right, scored = slots.correct().astype(jnp.float32), slots.scored.astype(jnp.float32)
    axes = tuple(range(right.ndim - 1))
    share = right.sum(axes) / jnp.maximum(scored.sum(axes), 1)
    blocks = jnp.maximum(slots.scored.any(-1).sum(), 1)
    row = jnp.cumprod(right, axis=-1).sum() / blocks
    return {f"right_{k + 1}": share[k] for k in range(share.shape[0])} | {"in_a_row": row}
