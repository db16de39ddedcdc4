"""A budget that stops where the next node is not worth its cost: the marginal rules of CAST, SMART and CaDDTree."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax.control.throughput import Calibration, Throughput
from spec_jax.topology import stop
from spec_jax.tree import Draft


@dataclasses.dataclass(frozen=True)
class Marginal(Throughput):
    """Counts nodes by a rule of `topology.stop` and verifies the narrowest width that holds them.

    One count serves the batch: the rule sees the chances of the n-th nodes added up over the running rows (CAST's
    global pool), and the cost of n nodes read between the compiled widths. Confidences are calibrated as in
    `Throughput`, which instead compares the widths themselves; where the cost is convex and the chances fall, the two
    agree up to the rounding. A cost that jumps between two widths is a straight line here.

    Attributes:
        rule: (chances, costs) -> node count, such as `stop.marginal` or `stop.Likely(0.05)`.
    """

    rule: stop.Rule = stop.marginal

    def decide(
        self,
        state: Calibration,
        draft: Draft,
        active: Bool[Array, "b"],
        cost: Float[Array, "w"],
        widths: tuple[int, ...],
    ) -> Int[Array, ""]:
        """The index of the width that holds the nodes worth their cost. Raises ValueError as `chance` does."""
        chance = self.chance(state, draft)
        pooled = jnp.where(active[:, None], chance, 0.0).sum(0)
        each = jnp.interp(jnp.arange(1.0, pooled.shape[0] + 1), jnp.asarray(widths, jnp.float32), cost)
        return stop.round_up(self.rule(pooled, each), widths)
