"""Reductions over a vocabulary in two stages.

XLA on CPU reduces a row one element at a time and a matrix over its leading axis in vectors; a row folded to
[V / 128, 128] takes the second way (a short row stays a row). The order of additions is fixed, so equal rows give equal
sums everywhere.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

_LANES = 128


def _fold(x: Num[Array, "v"], fill: float) -> Num[Array, "f lanes"]:
    if x.shape[0] <= _LANES:
        return x[None]
    return jnp.pad(x, (0, -x.shape[0] % _LANES), constant_values=fill).reshape(-1, _LANES)


def total(x: Num[Array, "v"]) -> Num[Array, ""]:
    """Sum."""
    return _fold(x, 0).sum(0).sum()


def peak(x: Float[Array, "v"]) -> Float[Array, ""]:
    """Maximum; NaN if any entry is NaN."""
    return _fold(x, -jnp.inf).max(0).max()


def argmax(x: Float[Array, "v"]) -> Int[Array, ""]:
    """Lowest index of the maximum; -1 where there is none: some entry is NaN or +inf, or all are -inf."""
    top, v = peak(x), x.shape[0]
    index = jnp.where(x == top, jnp.arange(v, dtype=jnp.int32), v)
    index = -_fold(-index, -v).max(0).max()
    return jnp.where((index < v) & jnp.isfinite(top), index, -1)


def log_sum_exp(x: Float[Array, "v"]) -> Float[Array, ""]:
    """log(sum(exp(x))); -inf where all entries are -inf."""
    top = peak(x)
    shift = jnp.where(jnp.isfinite(top), top, 0.0)
    return jnp.log(total(jnp.exp(x - shift))) + shift


def top_tokens(logits: Float[Array, "*b vocab"], k: int) -> Int[Array, "*b k"]:
    """Ids of the k greatest logits, greatest first, equal ones in any order; -1 where no more are above -inf.

    In two stages of about sqrt(k vocab) numbers: folded to rows of `lanes` columns, the k columns with the greatest
    maxima hold them all. XLA's own top-k over a vocabulary takes several times as long on CPU.
    """
    vocab = logits.shape[-1]
    lanes = min(vocab, _LANES * max(1, round((k * vocab) ** 0.5 / _LANES)))
    folded = jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, -vocab % lanes)], constant_values=-jnp.inf)
    folded = folded.reshape(*logits.shape[:-1], -1, lanes)
    _, column = lax.top_k(folded.max(-2), min(k, lanes))
    some = jnp.take_along_axis(folded, column[..., None, :], axis=-1)
    ids = jnp.arange(folded.shape[-2])[:, None] * lanes + column[..., None, :]
    flat = lambda x: x.reshape(*logits.shape[:-1], -1)  # noqa: E731
    top, at = lax.top_k(flat(some), k)
    return jnp.where(top > -jnp.inf, jnp.take_along_axis(flat(ids), at, axis=-1), -1).astype(jnp.int32)
