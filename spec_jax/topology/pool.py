"""Candidate nodes of a draft tree, and the best tree of a given size among them."""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from spec_jax.tree import Draft, Tree


@flax.struct.dataclass
class Pool:
    """Candidate nodes, the root left out.

    parent is a pool index, lower than the node's own, or -1 for the root. log_chance is the log of the product of the
    conditional chances on the node's root path, so never above its parent's; -inf (or NaN) marks an unused entry.
    """

    tokens: Int[Array, "*b p"]
    parent: Int[Array, "*b p"]
    log_chance: Float[Array, "*b p"]


def best(pool: Pool, anchor: Int[Array, ""], nodes: int) -> Draft:
    """The root and the nodes - 1 candidates of greatest chance, in descending order, so every prefix is the best too.

    Chances fall along a path and ties go to the lower index, so the tree is closed under parents and parents come
    first. The sum of chances is then the greatest that any such tree of its size has: the expected number of accepted
    nodes, if the chances are right (EAGLE-2's rerank, arXiv 2406.16858; OPT-Tree, arXiv 2406.17276).

    Raises:
        ValueError: for nodes below 1.
    """
    index = order(pool, nodes)[1:]
    valid, at = index >= 0, jnp.maximum(index, 0)
    size = pool.tokens.shape[0]
    place = jnp.zeros(size, jnp.int32).at[jnp.where(valid, index, size)].set(jnp.arange(1, nodes), mode="drop")
    parent = pool.parent[at]
    in_pool, above = parent >= 0, jnp.maximum(parent, 0)
    step = pool.log_chance[at] - jnp.where(in_pool, pool.log_chance[above], 0.0)
    row = lambda root, rest: jnp.append(jnp.asarray(root, rest.dtype), jnp.where(valid, rest, jnp.zeros_like(rest)))  # noqa: E731
    tree = Tree(
        tokens=row(anchor, pool.tokens[at].astype(jnp.int32)),
        parent=row(-1, jnp.where(in_pool, place[above], 0)),
        valid=row(True, valid),
    )
    return Draft(tree, row(1.0, jnp.exp(step)), proposal="point")


def order(pool: Pool, nodes: int) -> Int[Array, "n"]:
    """The pool index of each node of the `best` draft of that size; -1 for the root and for unused nodes."""
    if nodes < 1:
        raise ValueError(f"nodes: got {nodes}, takes at least 1, the root")
    take = min(nodes - 1, pool.log_chance.shape[0])
    chance, index = lax.top_k(jnp.where(pool.log_chance > -jnp.inf, pool.log_chance, -jnp.inf), take)
    return jnp.pad(jnp.where(chance > -jnp.inf, index, -1), (1, nodes - 1 - take), constant_values=-1)
