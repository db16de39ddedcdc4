"""Products of float32 matrices on an MXU that multiplies bfloat16, in passes that say what they leave out.

`Precision.DEFAULT` is one pass, silently, and interpret mode hides that; `HIGHEST` costs four times three of these.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

LANES = 128


def split(x: Array, terms: int) -> list[Array]:
    """Numbers that bfloat16 holds, whose sum is x but for its lowest bits; a bfloat16 array is its own and only term.

    They are float32 until they are multiplied, and rounded by their bits: a cast to bfloat16 and back leaves Mosaic
    with half-filled registers that it packs again.
    """
    if x.dtype == jnp.bfloat16:
        return [x.astype(jnp.float32)]
    out = []
    for _ in range(terms - 1):
        bits = lax.bitcast_convert_type(x, jnp.int32) + 0x8000
        out.append(lax.bitcast_convert_type(bits & -0x10000, jnp.float32))
        x = x - out[-1]
    return [*out, x]


def product(a: Sequence[Array], b: Sequence[Array], terms: int, across: int = 0) -> Array:
    """The sum of a times the sum of b, over a's last axis and b's axis `across`.

    Of the products of their terms those are left out that are as small as what `split` leaves out.
    """
    pairs = [(x, y) for i, x in enumerate(a) for j, y in enumerate(b) if i + j < terms]
    if a[0].shape[1] % LANES == 0:  # one long product, summed within the MXU where that can
        left, right = zip(*pairs, strict=True)
        return dot(jnp.concatenate(left, 1), jnp.concatenate(right, across), 1, across)
    return total(dot(x, y, 1, across) for x, y in pairs)


def total(parts: Iterable[Array]) -> Array:
    """The sum of arrays."""
    return functools.reduce(jnp.add, parts)


def dot(a: Array, b: Array, axis: int = 1, across: int = 0) -> Array:
    """One pass: both rounded to bfloat16, products and sums in float32."""
    dims = (((axis,), (across,)), ((), ()))
    return lax.dot_general(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), dims, preferred_element_type=jnp.float32)
