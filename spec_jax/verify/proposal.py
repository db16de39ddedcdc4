"""How a draft's tokens came about, as the rules that weigh p against q need it."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.sampling import reduce
from spec_jax.tree import Draft, Proposal


def require(draft: Draft, *takes: Proposal) -> None:
    """Refuse a draft that a rule is not exact for.

    Raises:
        ValueError: if the draft's proposal is none of `takes`, or it does not carry the law its tokens came from.
    """
    if draft.proposal not in takes or draft.law is None:
        kinds = " or ".join(repr(kind) for kind in takes)
        raise ValueError(
            f"draft: got a {draft.proposal!r} draft{' without a law' if draft.law is None else ''}, "
            f"takes a {kinds} one with the law its tokens came from"
        )


def law_of(draft: Draft, node: Int[Array, ""], vocab: int) -> Float[Array, "vocab"]:
    """The law that a node and its siblings were drawn from, over the whole vocabulary."""
    assert draft.law is not None
    q = jnp.exp(draft.law.log_probs[node])
    if draft.law.ids is None:
        return q
    return jnp.zeros(vocab, q.dtype).at[draft.law.ids[node]].add(q, mode="drop")


def drawn_from(draft: Draft, node: Int[Array, ""], vocab: int) -> Float[Array, "vocab"]:
    """The law that a node's own token was drawn from: without replacement, that of its siblings without its elders.

    All zero if the elders leave nothing of it.
    """
    q = law_of(draft, node, vocab)
    if draft.proposal != "without_replacement":
        return q
    tree, index = draft.tree, jnp.arange(draft.tree.tokens.shape[0])
    elder = (tree.parent == tree.parent[node]) & tree.valid & (index < node)
    q = q.at[jnp.where(elder, tree.tokens, vocab)].set(0.0, mode="drop")
    mass = reduce.total(q)
    return q / jnp.where(mass > 0, mass, 1.0)
