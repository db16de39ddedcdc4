"""Draft trees: a token and a parent per node, parents before children; everything else is derived.

Node 0 is the root, the anchor: the last committed token, which the target's state does not hold yet. A chain is a tree
in which every node's parent is the node before it.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Proposal = Literal["point", "coupled", "sampled", "without_replacement"]


@flax.struct.dataclass
class Tree:
    """A draft tree for one sequence (or [B, N] for a batch).

    parent[i] < i for every node but the root, whose parent is -1. A node counts only where `valid` holds; a valid
    node's parent is valid.
    """

    tokens: Int[Array, "*b n"]
    parent: Int[Array, "*b n"]
    valid: Bool[Array, "*b n"]


@flax.struct.dataclass
class Law:
    """The laws that the nodes' tokens were drawn from, one row per node; row 0 (the root) is unused.

    Siblings share a law: drawn without replacement, each comes from it without its elder siblings (those before it in
    the tree), renormalised. `ids` None means that column v is token v. log_probs is -inf outside the support.
    """

    log_probs: Float[Array, "*b n m"]
    ids: Int[Array, "*b n m"] | None = None


@flax.struct.dataclass
class Draft:
    """What a drafter proposes.

    proposal says how the tokens came about, and a rule that needs another kind refuses the draft: "point": chosen in
    any way; "coupled": chosen by a drafter's laws and the position's noise together; "sampled": an independent draw
    from `law`; "without_replacement": siblings drawn one after another from `law`, without repeats. Whether and how
    often a node was drawn for may depend on what was drawn before it, never on its own token.
    What takes "point" drafts takes "coupled" ones, and the other way round: `match` looks for a child by its token, and
    `point_mass` tests with noise of its own. So a draft may share the position's noise and say "point", as one that was
    merged or chosen from several does.
    confidence[i] is the drafter's estimate that node i is accepted if its parent is (1.0 for the root).
    """

    tree: Tree
    confidence: Float[Array, "*b n"]
    law: Law | None = None
    proposal: Proposal = flax.struct.field(pytree_node=False, default="point")


def chain(anchor: Int[Array, ""], tokens: Int[Array, "k"], length: Int[Array, ""]) -> Tree:
    """The chain of an anchor and the first `length` of k drafted tokens; k + 1 nodes."""
    k = tokens.shape[0]
    return Tree(
        tokens=jnp.concatenate([anchor[None], tokens]).astype(jnp.int32),
        parent=jnp.arange(-1, k, dtype=jnp.int32),
        valid=jnp.arange(k + 1) <= length,
    )


def alone(like: Draft, anchor: Int[Array, "b"]) -> Draft:
    """A batch's draft of the anchors alone, in the form of `like` (shapes will do)."""
    draft = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    first = jnp.broadcast_to(jnp.arange(draft.confidence.shape[-1]) == 0, draft.confidence.shape)
    tokens, parent = jnp.where(first, anchor[:, None], 0), jnp.where(first, -1, 0)
    confidence = first.astype(draft.confidence.dtype)
    return dataclasses.replace(draft, tree=Tree(tokens, parent, first), confidence=confidence)


def ancestors(parent: Int[Array, "n"]) -> Bool[Array, "n n"]:
    """Row i marks node i and all its ancestors; found by doubling the parent links log2(n) times."""
    n = parent.shape[0]
    reach = jnp.eye(n, dtype=bool) | (parent[:, None] == jnp.arange(n))
    for _ in range(max(1, (n - 1).bit_length())):
        reach = (reach.astype(jnp.float32) @ reach.astype(jnp.float32)) > 0
    return reach


def depth(parent: Int[Array, "n"]) -> Int[Array, "n"]:
    """Distance of every node from the root, 0 for the root."""
    return ancestors(parent).sum(-1, dtype=jnp.int32) - 1


def first(draft: Draft, n: int) -> Draft:
    """The draft's first n nodes: prefix-closed, since parents come before children."""
    cut = lambda x: x[..., :n]  # noqa: E731
    tree = jax.tree.map(cut, draft.tree)
    law = None if draft.law is None else jax.tree.map(lambda x: x[..., :n, :], draft.law)
    return dataclasses.replace(draft, tree=tree, confidence=cut(draft.confidence), law=law)
