"""Attention layers of the Qwen families: normed queries and keys, partial rotation, and maybe an output gate."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tree_attention import tree_attention
from spec_jax.models.linear import Linear
from spec_jax.models.norms import OnePlus, rms_norm
from spec_jax.models.qwen_config import QwenConfig
from spec_jax.models.rope import inverse_frequencies, rotate


@flax.struct.dataclass
class Attention:
    """The leaves; `gate` is None where the output is not gated."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: Float[Array, "*l head_dim"] | OnePlus
    k_norm: Float[Array, "*l head_dim"] | OnePlus
    gate: Linear | None = None


@flax.struct.dataclass
class KeyValues:
    """Keys and values: committed ones [B, kv, slots, head_dim], or staged ones of N nodes."""

    k: Float[Array, "*l b kv n head_dim"]
    v: Float[Array, "*l b kv n head_dim"]


def empty(config: QwenConfig, batch: int, slots: int, dtype: jnp.dtype) -> KeyValues:
    """Zeros in `slots` slots a row."""
    zeros = lambda: jnp.zeros((batch, config.num_kv_heads, slots, config.head_dim), dtype)  # noqa: E731
    return KeyValues(zeros(), zeros())


def project(
    config: QwenConfig,
    leaves: Attention,
    x: Float[Array, "b n hidden"],
    position: Int[Array, "b n"],
    length: int,
    window: int | None = None,
) -> tuple[Float[Array, "b n heads d"], KeyValues]:
    """Queries, keys and values, normed and rotated; `length` is the state's room (see `inverse_frequencies`)."""
    (b, n, _), flat, rope = x.shape, x.reshape(-1, x.shape[-1]), config.rope_of(window)
    inv_freq, factor = inverse_frequencies(rope, config.rotary_dim, config.max_position_embeddings, length)
    heads = lambda y: y.reshape(b, n, -1, config.head_dim)  # noqa: E731
    turn = lambda y, norm: rotate(  # noqa: E731
        rms_norm(heads(y), norm, config.rms_norm_eps), position, inv_freq, factor
    )
    q, k = turn(leaves.q(flat), leaves.q_norm), turn(leaves.k(flat), leaves.k_norm)
    return q, KeyValues(k.swapaxes(1, 2), heads(leaves.v(flat)).swapaxes(1, 2))


def combine(
    leaves: Attention, x: Float[Array, "b n hidden"], out: Float[Array, "b n heads d"]
) -> Float[Array, "b n hidden"]:
    """The gated heads' outputs through the output map; x is what the queries were made of."""
    b, n, hidden = x.shape
    flat = out.reshape(b * n, -1)
    if leaves.gate is not None:
        flat = flat * jax.nn.sigmoid(leaves.gate(x.reshape(b * n, hidden)))
    return leaves.o(flat).reshape(b, n, hidden)


def score(
    config: QwenConfig,
    leaves: Attention,
    x: Float[Array, "b n hidden"],
    cache: KeyValues,
    length: Int[Array, "b"],
    position: Int[Array, "b n"],
    mask: Bool[Array, "b n m"],
    staged: KeyValues | None,
    start: Int[Array, ""] | int,
    room: int,
    window: int | None = None,
) -> tuple[Float[Array, "b n hidden"], KeyValues]:
    """Nodes over the committed rows and their ancestors; returns outputs and staged rows.

    With `staged`, the n nodes are rows start .. start + n - 1 of its m. `room` is the slots that a whole text takes;
    with a window, a cache of fewer is a ring (see `models.attention`).
    """
    q, rows = project(config, leaves, x, position, room, window)
    if staged is not None:
        put = lambda old, new: lax.dynamic_update_slice_in_dim(old, new, start, axis=2)  # noqa: E731
        rows = jax.tree.map(put, staged, rows)
    options = {"window": window, "ring": window is not None and cache.k.shape[2] < room}
    out = tree_attention(q, cache.k, cache.v, length, rows.k, rows.v, mask, config.attention_scale, **options)
    return combine(leaves, x, out), rows
