"""Attention of a block's rows to the context's keys and values and to each other: while decoding, and over texts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tree_attention import tree_attention
from spec_jax.models.attention import held


def attend(
    q: Float[Array, "b s heads d"],
    cache_k: Float[Array, "b kv n d"],
    cache_v: Float[Array, "b kv n d"],
    length: Int[Array, "b"],
    k: Float[Array, "b kv m d"],
    v: Float[Array, "b kv m d"],
    causal: bool,
    window: int | None,
    ring: bool = False,
    carried: Bool[Array, "b s"] | None = None,
) -> Float[Array, "b s heads d"]:
    """The rows of one block a batch row, at text positions length .. , over `length` cached rows and their block.

    A causal row sees itself and earlier rows of its block, another one the whole block. A window leaves what is
    `window` or more positions away; with it the cache may be a ring (see `models.attention`). With `carried`, k and v
    have s rows in front of the block's, at the same positions, of which all see those that it marks.
    """
    b, s, _, d = q.shape
    block = near_mask(s, causal, window, carried)
    block = jnp.broadcast_to(block, (b, *block.shape[-2:]))
    if window is None or causal and carried is None:
        mask = block if window is None else jnp.broadcast_to(block_mask(s, causal, None), block.shape)
        return tree_attention(q, cache_k, cache_v, length, k, v, mask, d**-0.5, window=window, ring=ring)
    # Rows that see later ones are no tree path: their positions can't be read off a mask.
    slots = cache_k.shape[2]
    position = held(jnp.arange(slots), length[:, None], slots)[:, None]
    own = length[:, None] + jnp.arange(s)
    seen = (position >= 0) & (own[:, :, None] - position < window)
    cache_v = jnp.where(seen.any(1)[:, None, :, None], cache_v, 0)  # a weight of 0 times NaN is NaN
    keys, values = (jnp.concatenate(x, axis=2) for x in ((cache_k, k), (cache_v, v)))
    return _softmax(q, keys, values, jnp.concatenate([seen, block], axis=2))


def attend_text(
    q: Float[Array, "b a s heads d"],
    context_k: Float[Array, "b t kv d"],
    context_v: Float[Array, "b t kv d"],
    anchors: Int[Array, "b a"],
    k: Float[Array, "b a m kv d"],
    v: Float[Array, "b a m kv d"],
    causal: bool,
    window: int | None,
    carried: Bool[Array, "b a s"] | None = None,
) -> Float[Array, "b a s heads d"]:
    """All blocks of whole texts at once, differentiable: a block sees the context before its anchor, and itself.

    `carried` is as for `attend`.
    """
    b, a, s, _, d = q.shape
    t, kv = context_k.shape[1:3]
    rows = (q * d**-0.5).reshape(b, a, s, kv, -1, d)
    far = jnp.einsum("baskgd,btkd->bakgst", rows, context_k, preferred_element_type=jnp.float32)
    near = jnp.einsum("baskgd,bajkd->bakgsj", rows, k, preferred_element_type=jnp.float32)
    at = jnp.arange(t)
    seen = jnp.broadcast_to((at < anchors[:, :, None])[:, :, None], (b, a, s, t))
    if window is not None:
        own = anchors[:, :, None] + jnp.arange(s)
        seen &= own[..., None] - at < window
    far = jnp.where(seen[:, :, None, None], far, -jnp.inf)
    block = near_mask(s, causal, window, carried)
    near = jnp.where(block if carried is None else block[:, :, None, None], near, -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate([far, near], axis=-1), axis=-1).astype(v.dtype)
    out = jnp.einsum("bakgst,btkd->baskgd", weights[..., :t], context_v)
    out += jnp.einsum("bakgsj,bajkd->baskgd", weights[..., t:], v)
    return out.reshape(q.shape)


def block_mask(s: int, causal: bool, window: int | None) -> Bool[Array, "s s"]:
    """Which rows of a block see which of its rows."""
    apart = jnp.arange(s)[:, None] - jnp.arange(s)
    mask = apart >= 0 if causal else jnp.ones((s, s), bool)
    return mask if window is None else mask & (jnp.abs(apart) < window)


def near_mask(s: int, causal: bool, window: int | None, carried: Bool[Array, "*b s"] | None) -> Bool[Array, "*b s m"]:
    """`block_mask`, with the columns of carried rows in front: all rows see those that are there, within the window."""
    block = block_mask(s, causal, window)
    if carried is None:
        return block
    seen = carried[..., None, :] & block_mask(s, False, window)
    return jnp.concatenate([seen, jnp.broadcast_to(block, seen.shape)], axis=-1)


def _softmax(q: Array, k: Array, v: Array, mask: Array) -> Array:
    b, s, heads, d = q.shape
    rows = (q * d**-0.5).reshape(b, s, k.shape[1], -1, d)
    logits = jnp.einsum("bskgd,bknd->bkgsn", rows, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], logits, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("bkgsn,bknd->bskgd", weights, v).reshape(b, s, heads, d)
