"""Drafts of one anchor made into one: pruned by path chance, merged by shared prefixes, grafted."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from spec_jax import tree as trees
from spec_jax.topology.compact import log_chance, without_root
from spec_jax.topology.pool import Pool, best, order
from spec_jax.tree import Draft


def prune(draft: Draft, nodes: int, max_depth: int | None = None) -> Draft:
    """The draft's likeliest nodes down to a depth, likeliest first: `nodes` of them, the root among them ("point")."""
    chance = log_chance(draft)
    if max_depth is not None:
        chance = jnp.where(trees.depth(draft.tree.parent) <= max_depth, chance, -jnp.inf)
    pool = Pool(draft.tree.tokens[1:], without_root(draft.tree.parent), chance[1:])
    return best(pool, draft.tree.tokens[0], nodes)


def merge(first: Draft, second: Draft, nodes: int, keep_first: bool = False) -> Draft:
    """One tree of both drafts' paths, likeliest nodes first; the token of `first`'s root is the anchor ("point").

    Nodes of both with the same tokens on their root paths become one, with the greater of their path chances: RASD's
    fusion by longest prefix match (arXiv 2503.03434). No two siblings hold the same token, even if a draft's did.
    keep_first: all of `first`'s nodes stay, and those of `second` fill what room is left.

    Raises:
        ValueError: if keep_first is asked for and `nodes` cannot hold `first`.
    """
    return merge_traced(first, second, nodes, keep_first)[0]


def merge_traced(first: Draft, second: Draft, nodes: int, keep_first: bool = False) -> tuple[Draft, Int[Array, "n"]]:
    """`merge`, and each node's index in `first`, -1 for nodes that only `second` has (and unused ones)."""
    pool = _union([first, second])
    own = first.tree.tokens.shape[0] - 1
    if keep_first:
        if own >= nodes:
            raise ValueError(f"nodes: got {nodes}, takes at least the first draft's {own + 1}, all of which stay")
        ours = jnp.arange(pool.tokens.shape[0]) < own
        score = jnp.where(ours, jnp.inf, pool.log_chance)
        rank = jnp.argsort(jnp.argsort(jnp.where(pool.log_chance > -jnp.inf, -score, jnp.inf), stable=True))
        pool = dataclasses.replace(pool, log_chance=jnp.where(rank < nodes - 1, pool.log_chance, -jnp.inf))
    index = order(pool, nodes)
    origin = jnp.where((index >= 0) & (index < own), index + 1, -1).at[0].set(0)
    return best(pool, first.tree.tokens[0], nodes), origin.astype(jnp.int32)


def graft(draft: Draft, retrieved: Draft, keep: int, nodes: int, max_depth: int | None = None) -> Draft:
    """Graft (arXiv 2605.20104): prune a draft to `keep` nodes down to a depth, fill up to `nodes` with retrieved ones.

    Retrieved paths hang wherever their longest prefix ends in the pruned draft.
    """
    return merge(prune(draft, keep, max_depth), retrieved, nodes, keep_first=True)


def discount(draft: Draft, factor: Float[Array, ""]) -> Draft:
    """The draft with the chances of the root's children, and so of all paths, multiplied: for merging by trust."""
    confidence = jnp.where(draft.tree.parent == 0, draft.confidence * factor, draft.confidence)
    return dataclasses.replace(draft, confidence=confidence)


def rescore(draft: Draft, log_probs: Float[Array, "d v"]) -> Draft:
    """The draft with confidences read off another drafter's per-depth laws; `prune` then keeps what that one believes.

    Nodes deeper than the laws are left out. With `merge`: RASD's pruning of a retrieval tree (arXiv 2503.03434).
    """
    depth = trees.depth(draft.tree.parent)
    known = depth <= log_probs.shape[0]
    confidence = jnp.exp(log_probs[jnp.clip(depth - 1, 0, log_probs.shape[0] - 1), draft.tree.tokens])
    tree = dataclasses.replace(draft.tree, valid=draft.tree.valid & known)
    return Draft(tree, jnp.where(depth == 0, 1.0, confidence))


def _union(drafts: list[Draft]) -> Pool:
    """All nodes but the roots, one pool entry for each root path of tokens; entries of repeats are unused."""
    tokens = jnp.concatenate([d.tree.tokens[1:] for d in drafts])
    sizes = [d.tree.tokens.shape[0] - 1 for d in drafts]
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    parent = jnp.concatenate(
        [jnp.where(d.tree.parent[1:] > 0, d.tree.parent[1:] - 1 + o, -1) for d, o in zip(drafts, offsets, strict=True)]
    )
    chance = jnp.concatenate([log_chance(d)[1:] for d in drafts])
    speaker, parent = speakers(tokens, parent, chance > -jnp.inf)
    most = jnp.full(tokens.shape, -jnp.inf).at[speaker].max(chance)
    return Pool(tokens, parent, jnp.where(speaker == jnp.arange(tokens.shape[0]), most, -jnp.inf))


def speakers(
    tokens: Int[Array, "p"], parent: Int[Array, "p"], live: Bool[Array, "p"]
) -> tuple[Int[Array, "p"], Int[Array, "p"]]:
    """The first live node with each node's root path of tokens, and that of its parent (-1: the root).

    Nodes are a tree's without its root, and so are the indices; `parent` is -1 for the root's children.
    """
    size = tokens.shape[0]
    index = jnp.arange(size, dtype=jnp.int32)

    def step(i, carry):
        speaker, above = carry
        over = jnp.where(parent[i] < 0, -1, speaker[jnp.maximum(parent[i], 0)])
        above = above.at[i].set(over)
        same = live & (index < i) & (above == over) & (tokens == tokens[i]) & (speaker == index)
        return speaker.at[i].set(jnp.where(same, index, i).min()), above

    return lax.fori_loop(0, size, step, (index, jnp.full(size, -1, jnp.int32)))
