"""Tree attention in XLA: the readable form, the oracle of the kernels, and what runs on CPU."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

_CHUNK, _CHUNK_WORK = 128, 1024


def tree_attention(
    q: Float[Array, "b n heads d"],
    cache_k: Float[Array, "b kv s d"],
    cache_v: Float[Array, "b kv s d"],
    length: Int[Array, "b"],
    tree_k: Float[Array, "b kv m d"],
    tree_v: Float[Array, "b kv m d"],
    mask: Bool[Array, "b n m"],
    scale: float,
) -> Float[Array, "b n heads d"]:
    """Attention of n nodes to a prefix of `length` cached rows and to the staged rows that `mask` allows them.

    Grouped-query: heads is a multiple of kv. The tree block comes first, then the prefix in chunks up to the longest
    row's length, merged by an online softmax (arXiv 2205.14135), so that cost follows the text and not the buffer.
    Batch and key/value heads are one dimension, since XLA's CPU dot is twice slower over a long cache with two.
    """
    b, n, heads, d = q.shape
    kv, s = cache_k.shape[1:3]
    group = heads // kv
    rows = (q * scale).reshape(b, n, kv, group, d).swapaxes(1, 2).reshape(b * kv, n * group, d)
    flat = lambda x: x.reshape(b * kv, -1, d)  # noqa: E731

    def block(keys, values, allowed, peak, total, out):
        logits = jnp.einsum("gqd,gsd->gqs", rows, keys, preferred_element_type=jnp.float32)
        logits = jnp.where(allowed, logits, -jnp.inf)
        new = jnp.maximum(peak, logits.max(-1, keepdims=True))
        weights, keep = jnp.exp(logits - new), jnp.exp(peak - new)
        part = jnp.einsum("gqs,gsd->gqd", weights.astype(values.dtype), values)
        return new, total * keep + weights.sum(-1, keepdims=True), out * keep + part

    floor = jnp.full((b * kv, n * group, 1), jnp.finfo(jnp.float32).min)
    carry = (floor, jnp.zeros_like(floor), jnp.zeros(rows.shape, jnp.float32))
    in_tree = jnp.repeat(jnp.repeat(mask, kv, axis=0), group, axis=1)
    carry = block(flat(tree_k), flat(tree_v), in_tree, *carry)

    keys, values = flat(cache_k), flat(cache_v)
    size = min(s, max(_CHUNK, _CHUNK_WORK // n))
    row_length = jnp.repeat(length, kv)[:, None, None]

    def chunk(i, carry):
        start = jnp.minimum(i * size, s - size)
        slot = start + jnp.arange(size)
        cut = lambda x: lax.dynamic_slice_in_dim(x, start, size, axis=1)  # noqa: E731
        return block(cut(keys), cut(values), (slot >= i * size) & (slot < row_length), *carry)

    if size == s:
        carry = block(keys, values, jnp.arange(s) < row_length, *carry)
    else:
        carry = lax.fori_loop(0, (length.max() + size - 1) // size, chunk, carry)
    _, total, out = carry
    out = (out / jnp.where(total > 0, total, 1.0)).astype(q.dtype)
    return out.reshape(b, kv, n, group, d).swapaxes(1, 2).reshape(b, n, heads, d)
