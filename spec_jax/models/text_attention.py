"""Attention layers of the Qwen families over whole texts, without a cache: differentiable, for training."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spec_jax.models import gated_attention
from spec_jax.models.gated_attention import Attention, KeyValues
from spec_jax.models.qwen_config import QwenConfig

_ROWS, _BLOCKS = 128, 8


def attend_text(
    config: QwenConfig,
    leaves: Attention,
    x: Float[Array, "b t hidden"],
    window: int | None = None,
    passes: Sequence[KeyValues] = (),
) -> tuple[Float[Array, "b t hidden"], KeyValues]:
    """Whole texts, each position over itself and those before it; returns outputs, and keys and values.

    passes: keys and values of earlier passes over the same places. Row t then stands len(passes) positions further on
    and sees rows up to t of the first pass, and row t of the later ones and of its own: how a head that drafts
    from its own outputs sees them.
    """
    b, t, _ = x.shape
    position = jnp.broadcast_to(len(passes) + jnp.arange(t), (b, t))
    q, rows = gated_attention.project(config, leaves, x, position, t + len(passes), window)
    first, *more = (*passes, rows)
    return gated_attention.combine(leaves, x, _attend(q * config.attention_scale, first, more, window)), rows


def _attend(q: Array, text: KeyValues, own: Sequence[KeyValues], window: int | None) -> Float[Array, "b t heads d"]:
    """Blocks of scaled queries, _BLOCKS at most, over no key that is later than all of a block or out of its window."""
    b, t, heads, d = q.shape
    kv = text.k.shape[1]
    q = q.swapaxes(1, 2).reshape(b, kv, heads // kv, t, d)
    out, size = [], max(_ROWS, -(-t // _BLOCKS))
    for start in range(0, t, size):
        end, first = min(start + size, t), 0 if window is None else max(start - window + 1, 0)
        rows, (k, v) = q[:, :, :, start:end], (x[:, :, first:end] for x in (text.k, text.v))
        back = jnp.arange(start, end)[:, None] - jnp.arange(first, end)
        seen = (back >= 0) & (back < (window or t))
        dots = jnp.einsum("bkgtd,bksd->bkgts", rows, k, preferred_element_type=jnp.float32)
        at = [(x.k[:, :, None, start:end], x.v[:, :, None, start:end]) for x in own]
        mine = [(rows * k).sum(-1, dtype=jnp.float32)[..., None] for k, _ in at]
        weight = jax.nn.softmax(jnp.concatenate([jnp.where(seen, dots, -jnp.inf), *mine], axis=-1)).astype(v.dtype)
        mixed = jnp.einsum("bkgts,bksd->bkgtd", weight[..., : end - first], v)
        for i, (_, value) in enumerate(at, end - first):
            mixed += weight[..., i : i + 1] * value
        out.append(mixed)
    return jnp.concatenate(out, axis=3).reshape(b, heads, t, d).swapaxes(1, 2)
