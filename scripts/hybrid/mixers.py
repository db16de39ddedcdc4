"""The two mixers of Qwen3-Next over whole sequences: gated attention and the gated delta rule, in chunks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from .shape import Shape

KeysValues = tuple[Array, Array]
_ROWS = 128  # of queries at a time: keys after the last of them are left out of the product


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """RMS norm with the weight stored as its difference from one."""
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * (1 + weight)


def attention(
    params: dict[str, Array], x: Array, shape: Shape, offset: int = 0, past: KeysValues | None = None
) -> tuple[Array, KeysValues]:
    """Gated grouped-query attention with partial rotation of [B, T, d]: the output, and the keys and values.

    Causal. With the keys and values of a `past` pass over the same places, row t sees those of rows up to t and, of
    this pass, only its own (how a draft head sees its own first guess). `offset` is the position of row 0.
    """
    b, t, _ = x.shape
    heads, kv, dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    q, gate = jnp.split((x @ params["q"]).reshape(b, t, heads, 2 * dim), 2, -1)
    q = _rotate(rms_norm(q, params["q_norm"], shape.rms_norm_eps), shape, offset) * dim**-0.5
    k = _rotate(rms_norm((x @ params["k"]).reshape(b, t, kv, dim), params["k_norm"], shape.rms_norm_eps), shape, offset)
    v = (x @ params["v"]).reshape(b, t, kv, dim)
    q = q.reshape(b, t, kv, -1, dim).transpose(0, 2, 3, 1, 4)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    blocks = [slice(start, min(start + _ROWS, t)) for start in range(0, t, _ROWS)]
    out = jnp.concatenate([_attend(q[:, :, :, rows], k, v, rows, past) for rows in blocks], 3)
    out = out.transpose(0, 3, 1, 2, 4).reshape(b, t, heads * dim) * jax.nn.sigmoid(gate.reshape(b, t, heads * dim))
    return out @ params["o"], (k, v)


def _attend(q: Array, k: Array, v: Array, rows: slice, past: KeysValues | None) -> Array:
    """Some rows of the queries [B, Hkv, G, rows, D] over keys and values [B, Hkv, T, D]; later keys are not read."""
    seen_k, seen_v = (part[:, :, : rows.stop] for part in past or (k, v))
    scores = jnp.einsum("bkgtd,bksd->bkgts", q, seen_k)
    scores = jnp.where(jnp.tri(q.shape[3], rows.stop, rows.start, dtype=bool), scores, -jnp.inf)
    if past is None:
        return jnp.einsum("bkgts,bksd->bkgtd", jax.nn.softmax(scores), seen_v)
    own = jnp.einsum("bkgtd,bktd->bkgt", q, k[:, :, rows])
    weights = jax.nn.softmax(jnp.concatenate([scores, own[..., None]], -1))
    out = jnp.einsum("bkgts,bksd->bkgtd", weights[..., :-1], seen_v)
    return out + weights[..., -1:] * v[:, :, None, rows]


def _rotate(x: Array, shape: Shape, offset: int) -> Array:
    half = shape.rotary_dim // 2
    frequency = shape.rope_theta ** (-jnp.arange(half) / half)
    angle = (offset + jnp.arange(x.shape[1]))[:, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b, rest = jnp.split(x, [half, 2 * half], -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def gated_delta(params: dict[str, Array], x: Array, shape: Shape, chunk: int) -> Array:
    """Gated DeltaNet (arXiv 2412.06464) over [B, T, d], T a multiple of `chunk`."""
    b, t, _ = x.shape
    hk, r, dk, dv = _delta_sizes(shape)
    packed = (x @ params["qkvz"]).reshape(b, t, hk, 2 * dk + 2 * r * dv)
    q, k, v, z = jnp.split(packed, [dk, 2 * dk, 2 * dk + r * dv], -1)
    beta, a = jnp.split((x @ params["ba"]).reshape(b, t, hk, 2 * r), 2, -1)
    joined = jnp.concatenate([part.reshape(b, t, -1) for part in (q, k, v)], -1)
    joined = jax.nn.silu(_convolve(joined, params["conv"]))
    q, k, v = jnp.split(joined, [hk * dk, 2 * hk * dk], -1)
    q, k = (_unit(part.reshape(b, t, hk, dk)) for part in (q, k))
    decay = -jnp.exp(params["A_log"]) * jax.nn.softplus(a.reshape(b, t, hk * r) + params["dt_bias"])
    out = _chunked(q * dk**-0.5, k, v.reshape(b, t, hk, r, dv), decay.reshape(b, t, hk, r), jax.nn.sigmoid(beta), chunk)
    out = out * lax.rsqrt(jnp.mean(out * out, -1, keepdims=True) + shape.rms_norm_eps) * params["norm"]
    return (out.reshape(b, t, -1) * jax.nn.silu(z.reshape(b, t, -1))) @ params["out"]


def _delta_sizes(shape: Shape) -> tuple[int, int, int, int]:
    heads = shape.linear_num_key_heads
    return heads, shape.linear_num_value_heads // heads, shape.linear_key_head_dim, shape.linear_value_head_dim


def _convolve(x: Array, weight: Array) -> Array:
    """Causal depthwise convolution of [B, T, C] with [W, C]."""
    width = weight.shape[0]
    padded = jnp.pad(x, ((0, 0), (width - 1, 0), (0, 0)))
    return sum(padded[:, i : i + x.shape[1]] * weight[i] for i in range(width))  # pyright: ignore[reportReturnType]


def _unit(x: Array) -> Array:
    return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def _chunked(q: Array, k: Array, v: Array, decay: Array, beta: Array, chunk: int) -> Array:
    """The delta rule with T = n x chunk: a triangular solve inside the chunks, a scan over them.

    q, k [B, T, Hk, dk], v [B, T, Hk, R, dv], decay, beta [B, T, Hk, R]; returns [B, T, Hk, R, dv].
    """
    b, t, hk, dk = k.shape
    r, dv = v.shape[-2:]
    n = t // chunk
    q, k = (x.reshape(b, n, chunk, hk, dk).transpose(1, 0, 3, 2, 4)[:, :, :, None] for x in (q, k))
    v = v.reshape(b, n, chunk, hk, r, dv).transpose(1, 0, 3, 4, 2, 5)
    decay, beta = (x.reshape(b, n, chunk, hk, r).transpose(1, 0, 3, 4, 2) for x in (decay, beta))
    total = jnp.cumsum(decay, -1)
    since = jnp.where(jnp.tri(chunk, dtype=bool), total[..., :, None] - total[..., None, :], -jnp.inf)
    since = jnp.exp(since)
    kk = jnp.einsum("nbhoid,nbhojd->nbhoij", k, k) * since * beta[..., None]
    qk = jnp.einsum("nbhoid,nbhojd->nbhoij", q, k) * since
    right = jnp.concatenate([v, jnp.exp(total)[..., None] * k], -1) * beta[..., None]
    solved = lax.linalg.triangular_solve(kk, right, left_side=True, lower=True, unit_diagonal=True)
    u, w = solved[..., :dv], solved[..., dv:]
    into = jnp.exp(total)[..., None] * q
    out_of = jnp.exp(total[..., -1:] - total)[..., None] * k
    whole = jnp.exp(total[..., -1])[..., None, None]

    def step(state: Array, part: tuple[Array, ...]) -> tuple[Array, Array]:
        u, w, qk, into, out_of, whole = part
        u = u - w @ state
        return whole * state + jnp.swapaxes(out_of, -1, -2) @ u, into @ state + qk @ u

    _, out = lax.scan(step, jnp.zeros((b, hk, r, dk, dv), q.dtype), (u, w, qk, into, out_of, whole))
    return out.transpose(1, 0, 4, 2, 3, 5).reshape(b, t, hk, r, dv)
