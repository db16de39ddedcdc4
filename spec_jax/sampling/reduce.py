"""Reductions over a vocabulary in two stages.

XLA on CPU reduces a row one element at a time and a matrix over its leading axis in vectors; a row folded to
[V / 128, 128] takes the second way (a short row stays a row). The order of additions is fixed, so equal rows give equal
sums everywhere.
"""

from __future__ import annotations

import jax.numpy as jnp
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
    """Lowest index of the maximum; -1 where there is none: some entry is NaN, or all are -inf."""
    top, v = peak(x), x.shape[0]
    index = jnp.where(x == top, jnp.arange(v, dtype=jnp.int32), v)
    index = -_fold(-index, -v).max(0).max()
    return jnp.where((index < v) & (top > -jnp.inf), index, -1)


def log_sum_exp(x: Float[Array, "v"]) -> Float[Array, ""]:
    """log(sum(exp(x))); -inf where all entries are -inf."""
    top = peak(x)
    shift = jnp.where(jnp.isfinite(top), top, 0.0)
    return jnp.log(total(jnp.exp(x - shift))) + shift
