"""DySpec: a tree of draws without repeats that grows, draw by draw, where one is likeliest to be needed."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from spec_jax import noise
from spec_jax.sampling import reduce
from spec_jax.topology.sampled import NextLaw, draw_key
from spec_jax.tree import Draft, Law, Tree


def draw_next(
    key: noise.Key, log_q: Float[Array, "v"], taken: Int[Array, "n"], position: Int[Array, ""], node: Int[Array, ""]
) -> tuple[Int[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """A node's next child: a draw from what its elder siblings left of the law (-1: nothing).

    Returns the token, its share of what was left, and the likeliest token's chance there, before anything was drawn.

    Args:
        key: the request's key.
        log_q: log-probs of the law.
        taken: the elder siblings' tokens; entries that are none are the vocabulary size.
        position: text position of the draft's first level; it and the node key the draw, so no two rounds share one.
        node: the child's index in the draft.
    """
    left = log_q.at[taken].set(-jnp.inf, mode="drop")
    ids = jnp.arange(log_q.shape[0], dtype=jnp.int32)
    token = reduce.argmax(left + noise.gumbel(draw_key(key, node), position, ids))
    share = jnp.exp(left[jnp.maximum(token, 0)] - reduce.log_sum_exp(left))
    return token, jnp.where(token >= 0, share, 0.0), jnp.exp(reduce.peak(left))


def dynamic(
    key: noise.Key,
    anchor: Int[Array, ""],
    next_law: NextLaw,
    nodes: int,
    position: Int[Array, ""],
    max_depth: int | None = None,
) -> Draft:
    """DySpec's tree of up to `nodes` nodes ("without_replacement"), in the order in which it grows.

    Every node has one place where its next child would hang. The next draw goes to the place of greatest chance that
    it is looked at, the drafter's laws taken for the target's: the root's is 1; a draw of share r of what was left of
    its law hands r of its place's chance to its own first child's place, 1 - r to its next sibling's. So these chances
    fall in node order, every prefix is the tree of its size, and whether a node is drawn depends on earlier draws only.

    `next_law` and `position` are as for `branching`; it is called once per node, one after another.

    Source: DySpec, arXiv 2410.11744.

    Raises:
        ValueError: for nodes below 1.
    """
    if nodes < 1:
        raise ValueError(f"nodes: got {nodes}, takes at least 1, the root")
    deepest = nodes if max_depth is None else max_depth
    root = next_law(jnp.asarray(anchor, jnp.int32), jnp.int32(0))
    vocab, index = root.shape[0], jnp.arange(nodes)

    def step(node, carry):
        tree, depth, laws, place, confidence = carry
        at = jnp.argmax(place)
        taken = jnp.where((tree.parent == at) & tree.valid & (index > 0), tree.tokens, vocab)
        token, share, likeliest = draw_next(key, laws[at], taken, position, node)
        found = (place[at] > 0) & (token >= 0)
        token, share = jnp.where(found, token, 0), jnp.where(found, share, 1.0)
        tree = Tree(
            tokens=tree.tokens.at[node].set(token),
            parent=tree.parent.at[node].set(jnp.where(found, at, 0)),
            valid=tree.valid.at[node].set(found),
        )
        below = depth[at] + 1
        law = next_law(token, below)
        own = jnp.where(found & (below < deepest) & _any(law), place[at] * share, 0.0)
        return (
            tree,
            depth.at[node].set(below),
            laws.at[node].set(law),
            place.at[node].set(own).at[at].multiply(1.0 - share),
            confidence.at[node].set(jnp.where(found, likeliest, 0.0)),
        )

    tree = Tree(
        tokens=jnp.zeros(nodes, jnp.int32).at[0].set(anchor),
        parent=jnp.zeros(nodes, jnp.int32).at[0].set(-1),
        valid=index == 0,
    )
    laws = jnp.zeros((nodes, vocab)).at[0].set(root)
    place = jnp.zeros(nodes).at[0].set(jnp.where(_any(root) & (deepest > 0), 1.0, 0.0))
    start = (tree, jnp.zeros(nodes, jnp.int32), laws, place, (index == 0).astype(jnp.float32))
    tree, _, laws, _, confidence = lax.fori_loop(1, nodes, step, start)
    return Draft(tree, confidence, Law(laws[jnp.maximum(tree.parent, 0)]), "without_replacement")


def _any(log_q: Float[Array, "v"]) -> Bool[Array, ""]:
    """Whether there is anything to draw."""
    return reduce.peak(log_q) > -jnp.inf
