"""Long texts: a scan over chunks, each of which is a chain."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta import api
from pallas_kernels.gated_delta.factors import Pending, Staged, fold, folded, leading, sum_dtype
from pallas_kernels.gated_delta.reference import inner, outer
from pallas_kernels.gated_delta.rows import shield


def chunked(
    q: Float[Array, "b t hk dk"],
    k: Float[Array, "b t hk dk"],
    v: Float[Array, "b t hv dv"],
    decay: Float[Array, "b t hv *dk"],
    beta: Float[Array, "b t hv"] | None,
    state: Float[Array, "b hv dk dv"],
    count: Int[Array, "b"] | None = None,
    *,
    scale: float,
    q_norm: Float[Array, "b t hk"] | None = None,
    k_norm: Float[Array, "b t hk"] | None = None,
    chunk: int = 64,
    implementation: api.Implementation | None = "xla",
) -> tuple[Float[Array, "b t hv dv"], Float[Array, "b hv dk dv"]]:
    """Outputs and the state after the first `count` tokens of each row (None: all); prefill and training.

    The arrays are those of `api.gated_delta` with t tokens in place of n nodes. Tokens from `count` on may hold
    anything; their outputs are zero. Chunked form of arXiv 2406.06484 (DeltaNet) and 2412.06464 (Gated DeltaNet).

    implementation: "xla" has gradients and, with a decay per head, does what does not need the state for all chunks at
    once. A kernel (or None: the backend's own) runs chunk after chunk, each folding in the one before; no gradients.

    Raises ValueError for arguments that don't fit, as `api.gated_delta` does.
    """
    b, t = q.shape[:2]
    if chunk < 1:
        raise ValueError(f"chunk: got {chunk}, takes a positive number of tokens")
    if count is not None and count.shape != (b,):
        raise ValueError(f"count: got shape {count.shape}, takes {(b,)} beside q of shape {q.shape}")
    api.check(q, k, v, decay, beta, jax.ShapeDtypeStruct((b, t, t), jnp.bool_), state, None, q_norm, k_norm, None, None)
    api.check_implementation(implementation)
    count = jnp.full((b,), t, jnp.int32) if count is None else jnp.clip(count, 0, t)
    chunk = min(chunk, t)
    steps = math.ceil(t / chunk)
    arrays = (q, k, v, decay, beta, q_norm, k_norm)
    cut: list[Any] = [None if x is None else _cut(x, steps, chunk) for x in arrays]  # [steps, b, chunk, ...]
    lengths = jnp.clip(count - chunk * jnp.arange(steps)[:, None], 0, chunk)
    at_once = implementation == "xla" and decay.ndim == 3  # decays per channel are large: [chunk, chunk, dk] a chunk
    run = _all_at_once if at_once else _one_by_one
    output, state = run(cut, lengths, state, scale, implementation)
    return output.swapaxes(0, 1).reshape(b, steps * chunk, *output.shape[3:])[:, :t].astype(v.dtype), state


def _all_at_once(cut, lengths, state, scale, _):
    steps, b, size = cut[2].shape[:3]
    dtype = sum_dtype(*cut[:4], state)
    flat = lambda x: None if x is None else x.reshape(steps * b, *x.shape[2:])  # noqa: E731
    q, k, v, decay, beta, q_norm, k_norm = map(flat, cut)
    mask = _chain(lengths.reshape(-1), size)
    rows = shield(q, k, v, decay, beta, mask, q_norm, k_norm, None, size)
    tree = inner(rows, mask, scale, size, dtype)
    values = rows.v.swapaxes(1, 2).astype(dtype)
    apart = lambda x: x.reshape(steps, b, *x.shape[1:])  # noqa: E731
    factors = (rows.k, rows.k_norm, rows.decay.astype(dtype))

    def step(state, chunk):
        tree, values, (k, k_norm, decay), length = chunk
        output, u = outer(tree, values, state)
        return folded(state, leading(Staged(k, k_norm, u, decay), length)), output

    chunks = jax.tree.map(apart, (tree, values, factors))
    last, output = lax.scan(step, state.astype(dtype), (*chunks, lengths))
    broken = apart(rows.broken)
    before = jnp.cumsum(broken.any(2, keepdims=True), axis=0) > 0
    used = apart(mask.any(-1))[..., None]
    broken |= used & jnp.concatenate([jnp.zeros_like(before[:1]), before[:-1]])
    output = jnp.where(broken[..., None], jnp.nan, output.swapaxes(2, 3))
    return output, jnp.where(broken.any((0, 2))[..., None, None], jnp.nan, last).astype(state.dtype)


def _one_by_one(cut, lengths, state, scale, implementation):
    size = cut[2].shape[2]

    def step(carry, chunk):
        (q, k, v, decay, beta, q_norm, k_norm), length = chunk
        options = {"scale": scale, "q_norm": q_norm, "k_norm": k_norm, "implementation": implementation}
        result = api.gated_delta(q, k, v, decay, beta, _chain(length, size), *carry, **options)
        pending = leading(Staged(k, k_norm, result.u, decay.astype(result.u.dtype)), length)
        return (result.state, pending), result.output

    carry = (state, _nothing(cut[1][0], cut[6] if cut[6] is None else cut[6][0], cut[2][0], cut[3][0], state))
    (state, pending), output = lax.scan(step, carry, (tuple(cut), lengths))
    return output, fold(state, pending)


def _nothing(k, k_norm, v, decay, state) -> Pending:
    """Pending rows of a chunk's size of which none is accepted."""
    b, size = k.shape[:2]
    u = jnp.zeros((b, v.shape[2], size, v.shape[3]), sum_dtype(k, v, decay, state))
    staged = Staged(k, k_norm, u, decay.astype(u.dtype))
    return leading(staged, jnp.zeros((b,), jnp.int32))


def _chain(length: Int[Array, "b"], size: int) -> Array:
    """A chain's mask, of its first `length` nodes."""
    node = jnp.arange(size)
    return (node[:, None] >= node) & (node < length[:, None])[:, :, None]


def _cut(x: Array, steps: int, chunk: int) -> Array:
    b, t = x.shape[:2]
    x = jnp.pad(x, [(0, 0), (0, steps * chunk - t)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(b, steps, chunk, *x.shape[2:]).swapaxes(0, 1)
