"""What all drafters that grow their trees share: the draft, and what is learned from its verdict."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.drafters import ranking
from spec_jax.drafters.drafter import Committed, Context
from spec_jax.topology.branching import Branching, branch
from spec_jax.topology.coupling import Candidates, Fit, Learner
from spec_jax.topology.expander import Expander
from spec_jax.topology.growth import Growth, grow
from spec_jax.tree import Draft


class Shaped:
    """The sizes of a drafter whose drafts have a `shape`."""

    shape: Any

    @property
    def nodes(self) -> int:
        """The shape's."""
        return self.shape.nodes

    @property
    def depth(self) -> int:
        """The shape's."""
        return self.shape.depth

    @property
    def _growth(self) -> Growth | Branching:
        """The shape; for marginals a growth of as many nodes, whose depths are expanded one by one."""
        s = self.shape
        if isinstance(s, Growth | Branching):
            return s
        return Growth(s.nodes, s.depth, 1, 1, s.candidates, s.ranking)


def blank(growth: Growth | Branching, learner: Learner, batch: int, vocab: int) -> tuple[Candidates | None, Fit | None]:
    """Nothing seen and nothing learned; None without coupling."""
    if not isinstance(growth, Growth) or growth.ranking != "coupled":
        return None, None
    shape = (batch, growth.expanded, min(growth.candidates, vocab))
    seen = Candidates(jnp.zeros(shape, jnp.int32), jnp.zeros(shape), jnp.zeros(shape))
    return seen, learner.init(growth.depth)


def draft(
    growth: Growth | Branching,
    learner: Learner,
    expander: Expander,
    params: Any,
    pool: Any,
    logits: Float[Array, "b vocab"],
    fit: Fit | None,
    context: Context,
) -> tuple[Draft, Int[Array, "b n"], Candidates | None, Any]:
    """A tree in every row, with the rows' transforms; params, pool and logits are those of `growth.grow`.

    Returns the draft, the number under which the expander knows each node (-1: not expanded), the expanded nodes'
    candidates (None without coupling), and the expander's pool.
    """
    anchor = context.anchor
    if isinstance(growth, Branching):
        draw = ranking.drawer(growth, context)
        drawn, number, pool = branch(growth, expander, params, pool, anchor, logits, draw)
        return drawn, jnp.broadcast_to(number, drawn.tree.tokens.shape), None, pool
    rank = ranking.ranker(growth, context, None if fit is None else learner.weights(fit))
    grown = grow(growth, expander, params, pool, anchor, logits, rank, context.active)
    return grown.draft, grown.expanded, grown.trace, grown.pool


def on_path(number: Int[Array, "b n"], committed: Committed) -> Int[Array, "b m"]:
    """The expander's numbers of the accepted path's nodes, -1 for those not expanded; `number` has the draft's."""
    own, last = committed.path if committed.own is None else committed.own, number.shape[1] - 1
    found = jnp.take_along_axis(number, jnp.clip(own, 0, last), axis=1)
    return jnp.where((own >= 0) & (own <= last), found, -1)


def learn(
    learner: Learner, fit: Fit | None, seen: Candidates | None, committed: Committed, number: Int[Array, "b m"]
) -> Fit | None:
    """The fit after a verdict: what the target chose behind each expanded node of the accepted path.

    number are the expander's numbers of the path's nodes, -1 for those that were not expanded.
    """
    if fit is None or seen is None:
        return None
    c, depth = committed, fit.r.shape[0]
    at, number = jnp.arange(depth), number[:, :depth]
    chosen = jnp.where(at == c.length[:, None] - 1, c.next_token[:, None], c.tokens[:, 1 : depth + 1])
    known = (at < c.length[:, None]) & (number >= 0)
    row = lambda x: jnp.take_along_axis(x, jnp.maximum(number, 0)[:, :, None], axis=1)  # noqa: E731
    return learner.observe(fit, jax.tree.map(row, seen), jnp.where(known, chosen, -1))
