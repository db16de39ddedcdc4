"""Tree attention in XLA: the readable form, the oracle of the kernels, and what runs on CPU."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tree_attention import masks
from pallas_kernels.tree_attention.ring import blocks_of

_CHUNK = 128


def tree_attention(
    q: Float[Array, "b n heads d"],
    cache_k: Float[Array, "b kv s d"],
    cache_v: Float[Array, "b kv s d"],
    length: Int[Array, "b"],
    tree_k: Float[Array, "b kv m d"],
    tree_v: Float[Array, "b kv m d"],
    mask: Bool[Array, "b n m"],
    scale: float,
    *,
    window: int | None = None,
    sinks: int = 0,
    ring: bool = False,
    soft_cap: float | None = None,
) -> Float[Array, "b n heads d"]:
    """See `api.tree_attention`.

    The tree block comes first, then the prefix in chunks up to the longest row's length (with a window: from the
    shortest row's window; a ring as a whole), merged by an online softmax (arXiv 2205.14135), so that cost follows the
    text and not the buffer.
    Batch and key/value heads are one dimension, since XLA's CPU dot is twice slower over a long cache with two.
    """
    b, n, heads, d = q.shape
    kv, s = cache_k.shape[1:3]
    group = heads // kv
    tree_k, tree_v = masks.shield(tree_k, tree_v)
    rows = (q * scale).reshape(b, n, kv, group, d).swapaxes(1, 2).reshape(b * kv, n * group, d)
    flat = lambda x: x.reshape(b * kv, -1, d)  # noqa: E731

    def block(keys, values, allowed, peak, total, out):
        logits = jnp.einsum("gqd,gsd->gqs", rows, keys, preferred_element_type=jnp.float32)
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        logits = jnp.where(allowed, logits, -jnp.inf)
        new = jnp.maximum(peak, logits.max(-1, keepdims=True))
        weights, keep = jnp.exp(logits - new), jnp.exp(peak - new)
        part = jnp.einsum("gqs,gsd->gqd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
        return new, total * keep + weights.sum(-1, keepdims=True), out * keep + part

    floor = jnp.full((b * kv, n * group, 1), jnp.finfo(jnp.float32).min)
    carry = (floor, jnp.zeros_like(floor), jnp.zeros(rows.shape, jnp.float32))
    per_row = lambda x: jnp.repeat(jnp.repeat(x, kv, axis=0), group, axis=1)  # noqa: E731
    in_tree = per_row(masks.narrow(mask, length, window, sinks))
    carry = block(flat(tree_k), flat(tree_v), in_tree, *carry)

    keys, values = flat(cache_k), flat(cache_v)
    size = min(s, _CHUNK)
    blocks = blocks_of(size, s, window, sinks, ring)
    row_length = jnp.repeat(length, kv)[:, None, None]
    depth = 0 if window is None else per_row(masks.depth(mask))[..., None]

    def prefix(keys, values, slot, fresh, carry):
        used = fresh & blocks.visible(slot, row_length, 0)
        values = jnp.where(used.swapaxes(1, 2), values, 0)  # a weight of 0 times NaN is NaN
        return block(keys, values, fresh & blocks.visible(slot, row_length, depth), *carry)

    def chunk(i, carry):
        if window is not None:
            i = jnp.where(i < blocks.heads, i, first + i - blocks.heads)
        start = jnp.minimum(i * size, s - size)
        slot = start + jnp.arange(size)
        cut = lambda x: lax.dynamic_slice_in_dim(x, start, size, axis=1)  # noqa: E731
        return prefix(cut(keys), cut(values), slot, slot >= i * size, carry)

    if size == s:
        carry = prefix(keys, values, jnp.arange(s), True, carry)
    else:
        first = blocks.first(length.min())
        carry = lax.fori_loop(0, blocks.heads + jnp.maximum(blocks.used(length.max()) - first, 0), chunk, carry)
    _, total, out = carry
    out = (out / jnp.where(total > 0, total, 1.0)).astype(q.dtype)
    return out.reshape(b, kv, n, group, d).swapaxes(1, 2).reshape(b, n, heads, d)
