"""GOOSE: reliable tokens as a deep spine, less reliable ones as wide branches hung on each of its nodes."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.topology.compact import LEAST, log_chance, without_root
from spec_jax.topology.pool import Pool, best
from spec_jax.tree import Draft


def spine_tree(spine: Draft, following: Int[Array, "n k"], rates: Float[Array, "k"], nodes: int) -> Draft:
    """A draft with ranked alternatives as further children of each of its nodes, likeliest nodes first ("point").

    The spine is a chain from a source that is often right (a match in the text), or a tree of such chains; following[i]
    are the tokens that another source has for after node i (last seen successors), likeliest first, -1 where it has
    none. One of rank r is right with chance rates[r] where none of the spine's own children is: so a spine that is sure
    of itself is deep and bare, one that is not is short and wide. A token that is a child already is left out.

    Source: GOOSE, arXiv 2604.02047; the weighting is ours.
    """
    n, k = following.shape
    tree, chance = spine.tree, log_chance(spine)
    children = (tree.parent[None] == jnp.arange(n)[:, None]) & tree.valid[None] & (jnp.arange(n)[None] > 0)
    left = 1.0 - jnp.where(children, spine.confidence[None], 0.0).sum(-1)
    taken = (children[:, None] & (tree.tokens[None, None] == following[:, :, None])).any(-1)
    earlier = (following[:, None] == following[:, :, None]) & jnp.tril(jnp.ones((k, k), bool), -1)
    gained = jnp.log(jnp.clip(left, LEAST, 1.0))[:, None] + jnp.log(jnp.clip(rates, LEAST, 1.0))
    new = (following >= 0) & ~taken & ~earlier.any(-1)
    branches = jnp.where(new, chance[:, None] + gained, -jnp.inf)
    pool = Pool(
        tokens=jnp.concatenate([tree.tokens[1:], following.reshape(-1)]),
        parent=jnp.concatenate([without_root(tree.parent), jnp.repeat(jnp.arange(n) - 1, k)]),
        log_chance=jnp.concatenate([chance[1:], branches.reshape(-1)]),
    )
    return best(pool, tree.tokens[0], nodes)
