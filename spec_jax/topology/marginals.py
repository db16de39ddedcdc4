"""Best-first trees over per-depth marginals (DDTree): the likeliest combinations of tokens chosen depth by depth."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from spec_jax.topology.pool import Pool, best
from spec_jax.tree import Draft, Proposal


def best_first(
    log_q: Float[Array, "d m"],
    ids: Int[Array, "d m"],
    anchor: Int[Array, ""],
    nodes: int,
    proposal: Proposal = "point",
) -> Draft:
    """The `nodes` nodes of greatest chance, where a node's chance is the product of marginals on its root path.

    Equal to DDTree's heap up to ties, in `d` steps: the n best nodes of a depth are children of the n best of the depth
    above, and the child of the i-th best node by the j-th best token is only among them if i * j <= n.

    Args:
        log_q: log-chances of the candidates of each depth given that the depth above is right, in any order; -inf
            marks no candidate. Coupled ones come from `coupling.log_chance`.
        ids: their tokens, distinct in each row.
        anchor: the root's token.
        nodes: nodes of the draft, the root among them.
        proposal: how the candidates were ranked, "point" or "coupled".

    Source: DDTree; CaDDTree and CAST stop at a prefix of it, by cost.
    """
    depth, m = log_q.shape
    n = max(1, nodes - 1)
    pairs = [(i, j) for i in range(n) for j in range(min(m, n // (i + 1)))]
    above, rank = (jnp.asarray(x) for x in np.array(pairs).T)
    kept = min(n, len(pairs))
    log_q, order = lax.top_k(jnp.where(log_q > -jnp.inf, jnp.minimum(log_q, 0.0), -jnp.inf), m)
    ids = jnp.take_along_axis(ids, order, axis=1)

    def level(chance: Array, row: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array, Array]]:
        marginal, tokens = row
        chance, pick = lax.top_k(chance[above] + marginal[rank], kept)
        return jnp.pad(chance, (0, n - kept), constant_values=-jnp.inf), (chance, tokens[rank[pick]], above[pick])

    root = jnp.full(n, -jnp.inf).at[0].set(0.0)
    _, (chance, tokens, parent) = lax.scan(level, root, (log_q, ids))
    offset = (jnp.arange(depth)[:, None] - 1) * kept
    parent = jnp.where(offset < 0, -1, parent + offset)
    draft = best(Pool(tokens.reshape(-1), parent.reshape(-1), chance.reshape(-1)), anchor, nodes)
    return dataclasses.replace(draft, proposal=proposal)
