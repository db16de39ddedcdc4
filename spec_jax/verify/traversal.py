"""Verification from the leaves to the root: a path passes as a whole; what fails below a node leaves it a chance."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from spec_jax import noise
from spec_jax import tree as trees
from spec_jax.sampling import reduce
from spec_jax.tree import Draft
from spec_jax.verify.nodes import node_laws
from spec_jax.verify.proposal import drawn_from, law_of, require
from spec_jax.verify.scores import Scores
from spec_jax.verify.verdict import Verdict, Walk


@flax.struct.dataclass
class _Climb:
    """Where the traversal is. For every node: the last child tried, the chance that the path down to it is accepted,
    and its residual as the numbers a and b in max(a p - b q, 0)."""

    node: Int[Array, ""]
    done: Bool[Array, ""]
    tried: Int[Array, "n"]
    chance: Float[Array, "n"]
    a: Float[Array, "n"]
    b: Float[Array, "n"]


def traversal(key: noise.Key, draft: Draft, scores: Scores, m: int) -> Verdict:
    """Traversal Verification: accept the first node, leaves before their parents, whose whole path passes.

    A child x of a node that is accepted with chance alpha gets the chance min(1, alpha p(x) / q(x)). A subtree is
    tried from its first leaf on; once a child and all below it are rejected, its parent has

        p <- max(alpha p - q, 0) / S,    alpha <- S / (S + 1 - alpha),    S = sum(max(alpha p - q, 0)),

    and the next child is tried against these, the node itself after the last one. So a good token can save a doubtful
    one above it: at least as many tokens are accepted as by `rejection`. Siblings may be independent draws or without
    replacement.

    All that is below a node has a say in its acceptance. The draft's noise must therefore be new in every round: a
    token drawn again, at the text position and with the noise of a token that was rejected before, biases the text.
    (The rules that walk down do not mind.) The target's law is computed at all N nodes.

    Raises:
        ValueError: if the draft's tokens were not drawn from a law.

    Source: Weng et al., Traversal Verification, arXiv 2505.12398.
    """
    require(draft, "sampled", "without_replacement")
    tree, (n, vocab) = draft.tree, scores.logits.shape
    accept_key, residual_key = noise.stream(key, "accept"), noise.stream(key, "residual")
    index = jnp.arange(n, dtype=jnp.int32)
    laws, depth = node_laws(tree, scores), trees.depth(tree.parent)
    sound = jnp.isfinite(laws.sum(-1))
    live = tree.valid & (index > 0) & (depth < m) & sound[tree.parent]

    def residual(node: Array, child: Array, c: _Climb) -> Array:
        """What the rejected children leave of the node's law, in any scale; `child` tells their common q."""
        used = jnp.where(c.b[node] > 0, c.b[node] * law_of(draft, child, vocab), 0.0)
        return jnp.maximum(c.a[node] * laws[node] - used, 0.0)

    def step(c: _Climb) -> _Climb:
        below = jnp.where((tree.parent == c.node) & live & (index > c.tried[c.node]), index, n).min()
        down = below < n
        # A node is tested once a round, so the round's position and the node make the number a new one.
        u = noise.uniform(accept_key, scores.position, c.node)
        accepted = ~down & ((c.node == 0) | (u < c.chance[c.node]))
        up = ~down & ~accepted
        child = jnp.where(down, below, c.node)
        node = jnp.where(down, c.node, tree.parent[c.node])

        p, q, x = residual(node, child, c), drawn_from(draft, child, vocab), tree.tokens[child]
        drawn, alpha = q[x] > 0, c.chance[node]
        enter = jnp.where(drawn, jnp.minimum(1.0, alpha * p[x] / jnp.where(drawn, q[x], 1.0)), 0.0)
        left = reduce.total(jnp.maximum(alpha * p - q, 0.0))
        scale = jnp.where(left > 0, left, 1.0)
        share = q[x] / jnp.where(drawn, law_of(draft, child, vocab)[x], 1.0)
        put = lambda xs, at, value, where: xs.at[jnp.where(where, at, n)].set(value, mode="drop")  # noqa: E731
        chance = put(c.chance, child, enter, down)
        return _Climb(
            node=jnp.where(accepted, c.node, jnp.where(down, child, node)),
            done=accepted,
            tried=put(c.tried, node, child, up),
            chance=put(chance, node, jnp.where(left > 0, left / (scale + 1 - alpha), 0.0), up & drawn),
            a=put(c.a, node, alpha * c.a[node] / scale, up & drawn),
            b=put(c.b, node, (alpha * c.b[node] + share) / scale, up & drawn),
        )

    zeros, ones = jnp.zeros(n, jnp.int32), jnp.ones(n)
    start = _Climb(jnp.int32(0), jnp.bool_(False), zeros, ones, ones, jnp.zeros(n))
    end = lax.while_loop(lambda c: ~c.done, step, start)

    rest = residual(end.node, end.tried[end.node], end)
    rest = jnp.where(reduce.total(rest) > 0, rest, laws[end.node])
    gumbel = noise.gumbel(residual_key, scores.position + depth[end.node], jnp.arange(vocab, dtype=jnp.int32))
    last = reduce.argmax(jnp.log(rest) + gumbel)
    path = trees.ancestors(tree.parent)[end.node] & (index > 0)

    def emit(walk: Walk) -> Walk:
        child = jnp.where(path & (tree.parent == walk.node), index, n).min()
        token = jnp.where(child < n, tree.tokens[child], last)
        return walk.emit(token, child, scores.z(walk.node, walk.history), scores)

    return lax.while_loop(lambda walk: ~walk.done, emit, Walk.start(scores, m)).verdict


def block(key: noise.Key, draft: Draft, scores: Scores, m: int) -> Verdict:
    """Block Verification: the longest prefix of a chain that passes as a whole; the best rule for one drawn chain.

    It is `traversal` along first children; siblings behind a first one are not looked at (use `traversal` for trees).
    What `traversal` says of the draft's noise holds here too.

    Raises:
        ValueError: if the draft's tokens were not drawn from a law.

    Source: Sun et al., Block Verification, arXiv 2403.10444, algorithm 2.
    """
    tree = draft.tree
    index = jnp.arange(tree.tokens.shape[0])
    same = (tree.parent[:, None] == tree.parent) & tree.valid & (index < index[:, None])
    first = ~(same & (index > 0)).any(1) | (index == 0)
    spine = tree.valid & (first | ~trees.ancestors(tree.parent)).all(1)
    return traversal(key, dataclasses.replace(draft, tree=dataclasses.replace(tree, valid=spine)), scores, m)
