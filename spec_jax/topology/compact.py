"""A draft's nodes in another order, and its unused nodes moved to the end."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax import tree as trees
from spec_jax.tree import Draft, Tree

LEAST = 1e-6
"""A used node's chance counts as at least this much, so that it is told from an unused one."""


def compact(draft: Draft, keep: Bool[Array, "n"]) -> Draft:
    """The draft without the nodes that are not kept or not valid, and without all below them; as many nodes as before.

    What stays keeps its order, so siblings are still in the order they were drawn in.
    """
    n = draft.tree.tokens.shape[0]
    index = jnp.arange(n)
    live = (keep & draft.tree.valid) | (index == 0)
    live = (live | ~trees.ancestors(draft.tree.parent)).all(-1)
    order = jnp.argsort(jnp.where(live, index, n), stable=True)
    place = jnp.zeros(n, jnp.int32).at[order].set(jnp.arange(n, dtype=jnp.int32))
    used = live[order]
    tree = Tree(
        tokens=jnp.where(used, draft.tree.tokens[order], 0),
        parent=jnp.where(used, place[jnp.maximum(draft.tree.parent[order], 0)], 0).at[0].set(-1),
        valid=used,
    )
    law = None if draft.law is None else jax.tree.map(lambda x: x[order], draft.law)
    return dataclasses.replace(draft, tree=tree, confidence=jnp.where(used, draft.confidence[order], 0.0), law=law)


def log_chance(draft: Draft) -> Float[Array, "n"]:
    """Log of the product of confidences on every node's root path, never above its parent's; -inf if it is unused."""
    above = trees.ancestors(draft.tree.parent)
    own = jnp.log(jnp.clip(draft.confidence, LEAST, 1.0)).at[0].set(0.0)
    total = jnp.where(above, own, 0.0).sum(-1)
    total = jnp.where(above, total, 0.0).min(-1)
    return jnp.where((draft.tree.valid | ~above).all(-1), total, -jnp.inf)


def without_root(parent: Int[Array, "n"]) -> Int[Array, "p"]:
    """The parents of a tree's nodes but the root, as indices among them; -1 for the root."""
    return parent[1:] - 1
