"""The target's word on texts that branch off a text: what it would write behind an anchor, or thinks of a draft there.

The text and all branches are one tree, which the target scores as it scores any draft: a chain of the text's tokens,
and behind each anchor a chain of K tokens more. So this works for every target, gated delta layers included.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from spec_jax.models.target import Output, Target
from spec_jax.tree import Tree


@flax.struct.dataclass
class Branches:
    """What the target says behind each anchor, along K tokens: token k (from 0) stands at anchor + k + 1.

    logits[k] are those that token k is chosen by, so logits[0] the anchor's own; features[k] the anchor's, then those
    of tokens 0 .. K - 2 (None without taps).
    """

    tokens: Int[Array, "b r k"]
    logits: Float[Array, "b r k vocab"]
    features: Array | None = None


def read(
    target: Target,
    params: Any,
    tokens: Int[Array, "b t"],
    anchors: Int[Array, "b r"],
    drafted: Int[Array, "b r k"],
) -> Branches:
    """The target's logits along drafted tokens behind every anchor, in one pass (on-policy distillation's teacher)."""
    tree, at = _grown(tokens, anchors, drafted)
    output, _, _ = target.score(params, target.init_state(params, tokens.shape[0], tree.tokens.shape[1]), tree)
    return _branches(drafted, output, at)


def judge(
    target: Target, params: Any, tokens: Int[Array, "b t"], anchors: Int[Array, "b r"], drafts: Tree
) -> Float[Array, "b r n vocab"]:
    """The target's logits behind every node of a tree [B, R, N] at every anchor, in one pass; node 0 is the anchor."""
    (b, t), (_, r, n) = tokens.shape, drafts.tokens.shape
    node = t + jnp.arange(r * (n - 1)).reshape(r, n - 1)
    at = jnp.concatenate([anchors[..., None], jnp.broadcast_to(node, (b, r, n - 1))], axis=2)
    above = jnp.take_along_axis(at, drafts.parent[..., 1:], axis=2)
    chain = jnp.broadcast_to(jnp.arange(-1, t - 1), (b, t))
    flat = lambda first, x: jnp.concatenate([first, x.reshape(b, -1)], axis=1)  # noqa: E731
    whole = flat(tokens, drafts.tokens[..., 1:]).astype(jnp.int32)
    valid = flat(jnp.ones((b, t), bool), drafts.valid[..., 1:])
    tree = Tree(whole, flat(chain, above).astype(jnp.int32), valid)
    output, _, _ = target.score(params, target.init_state(params, b, whole.shape[1]), tree)
    return jax.vmap(lambda row, at: row[at])(output.logits, at)


def rollout(target: Target, params: Any, tokens: Int[Array, "b t"], anchors: Int[Array, "b r"], depth: int) -> Branches:
    """The target's own greedy continuation behind every anchor: the labels of ALR (arXiv 2609.38795, eq. 3).

    The text is scored once, then a token of all branches at a time. Ties go to the lower token id.
    """
    b, t = tokens.shape
    r = anchors.shape[1]
    empty = jnp.zeros((b, r, depth), jnp.int32)
    tree, at = _grown(tokens, anchors, empty)
    n = tree.tokens.shape[1]
    state = target.init_state(params, b, n)
    _, room, _ = jax.eval_shape(lambda: target.score(params, state, tree))
    staged = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), room)
    output, staged, state = target.score(params, state, tree, staged, (0, t))
    pick = lambda x, i: jax.vmap(lambda row, at: row[at])(x, i)  # noqa: E731
    logits = [pick(output.logits, anchors)]
    features = [None if output.features is None else pick(output.features, anchors)]
    grown, chosen = tree.tokens, []
    for k in range(depth):
        token = jnp.argmax(logits[-1], -1).astype(jnp.int32)
        chosen.append(token)
        if k + 1 == depth:
            break
        grown = lax.dynamic_update_slice_in_dim(grown, token, t + k * r, axis=1)
        here = Tree(grown, tree.parent, tree.valid)
        output, staged, state = target.score(params, state, here, staged, (t + k * r, r))
        logits.append(output.logits)
        features.append(output.features)
    stack = lambda parts: None if parts[0] is None else jnp.stack(parts, axis=2)  # noqa: E731
    return Branches(jnp.stack(chosen, axis=2), jnp.stack(logits, axis=2), stack(features))


def spliced(
    tokens: Int[Array, "b t"],
    features: Float[Array, "b t taps hidden"],
    anchors: Int[Array, "b r"],
    branches: Branches,
    parent: Int[Array, "b g"],
) -> tuple[Int[Array, "b g u"], Float[Array, "b g u taps hidden"]]:
    """Texts that go on with the branch behind anchor `parent`, and their features; u = t + K. Behind that stand zeros.

    The last branch token has no feature, which no block inside the branch looks at.
    """
    t, k = tokens.shape[1], branches.tokens.shape[2]
    if branches.features is None:
        raise ValueError("target: got branches without features, takes a target with the forward's taps")
    pick = jax.vmap(lambda x, at: x[at])
    place, new, seen = (pick(x, parent) for x in (anchors, branches.tokens, branches.features))

    def one(text: Array, known: Array, at: Array, new: Array, seen: Array) -> tuple[Array, Array]:
        own, offset = jnp.arange(t + k), jnp.arange(k)
        text = jnp.where(own <= at, jnp.pad(text, (0, k)), 0).at[at + 1 + offset].set(new)
        known = jnp.pad(known, ((0, k), (0, 0), (0, 0)))
        known = jnp.where((own < at)[:, None, None], known, 0.0)
        return text.astype(jnp.int32), known.at[at + offset].set(seen.astype(known.dtype))

    return jax.vmap(jax.vmap(one, (None, None, 0, 0, 0)))(tokens, features, place, new, seen)


def secondary(
    branches: Branches,
    parent: Int[Array, "b s"],
    offset: Int[Array, "b s"],
    real: Bool[Array, "b s"],
) -> tuple[Int[Array, "b s k"], Float[Array, "b s k vocab"], Bool[Array, "b s k"]]:
    """Blocks inside rollouts: IRA (arXiv 2609.38795, eq. 4). Labels, logits, and which slots count.

    Block i lies in the rollout of primary `parent`, its anchor is rollout token `offset` (counted from 1; the paper
    draws it from 2 .. K - 1), and its slot k has the label and logits of the primary's slot offset + k.
    """
    slots = branches.tokens.shape[2]
    at = offset[..., None] + jnp.arange(slots)
    inside = (at < slots) & real[..., None]
    at = jnp.minimum(at, slots - 1)
    rows = lambda x: jax.vmap(lambda x, p, at: x[p[:, None], at])(x, parent, at)  # noqa: E731
    return rows(branches.tokens), rows(branches.logits), inside


def alive(tokens: Int[Array, "*b k"], eos: tuple[int, ...]) -> Bool[Array, "*b k"]:
    """Rollout tokens up to and including the first end of sequence."""
    ended = jnp.zeros(tokens.shape, bool)
    for token in eos:
        ended |= tokens == token
    return jnp.cumsum(ended, axis=-1) - ended == 0


def _grown(tokens: Array, anchors: Array, drafted: Array) -> tuple[Tree, Array]:
    """The text with all branches but their last tokens, level by level; and [B, R, K] the node each token follows."""
    (b, t), (_, r, k) = tokens.shape, drafted.shape
    node = t + jnp.arange((k - 1) * r).reshape(k - 1, r)
    at = jnp.concatenate([anchors[:, None], jnp.broadcast_to(node, (b, k - 1, r))], axis=1)
    chain = jnp.broadcast_to(jnp.arange(-1, t - 1), (b, t))
    parent = jnp.concatenate([chain, at[:, :-1].reshape(b, -1)], axis=1).astype(jnp.int32)
    inner = drafted[:, :, :-1].swapaxes(1, 2).reshape(b, -1)
    whole = jnp.concatenate([tokens, inner], axis=1).astype(jnp.int32)
    return Tree(whole, parent, jnp.ones(whole.shape, bool)), at.swapaxes(1, 2)


def _branches(drafted: Array, output: Output, at: Array) -> Branches:
    pick = jax.vmap(lambda row, at: row[at])
    features = None if output.features is None else pick(output.features, at)
    return Branches(drafted, pick(output.logits, at), features)
