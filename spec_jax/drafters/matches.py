"""How far a text's end agrees with what stands before each place of a buffer: the search behind all retrieval drafters."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

NO_TOKEN = -1
"""Stands between texts in a buffer; agrees with nothing."""

_OUTSIDE = -2


def suffix(tokens: Int[Array, "text"], length: Int[Array, ""], size: int) -> Int[Array, "size"]:
    """The last `size` tokens of tokens[:length], the last one first; places before the text agree with nothing."""
    at = length - 1 - jnp.arange(size)
    return jnp.where(at >= 0, tokens[jnp.maximum(at, 0)], _OUTSIDE)


def match_lengths(buffer: Int[Array, "n"], end: Int[Array, "size"], ring: bool = False) -> Int[Array, "n"]:
    """For every place i, how many of buffer[i], buffer[i - 1], .. equal end[0], end[1], ..; at most `size`.

    ring: the place before the first is the last.
    """
    n, size = buffer.shape[0], end.shape[0]
    before = buffer[n - size :] if ring else jnp.full(size, NO_TOKEN, buffer.dtype)
    padded = jnp.concatenate([before, buffer])
    agree, length = jnp.ones(n, bool), jnp.zeros(n, jnp.int32)
    for j in range(size):
        agree = agree & (padded[size - j : size - j + n] == end[j])
        length = length + agree
    return length


def continuation(tokens: Int[Array, "text"], length: Int[Array, ""], at: Int[Array, ""], k: int) -> Int[Array, "k"]:
    """The k tokens behind place `at` < length - 1 of a text, going on with these tokens themselves where the text ends."""
    period = jnp.maximum(length - 1 - at, 1)
    return tokens[jnp.clip(at + 1 + jnp.arange(k) % period, 0, tokens.shape[0] - 1)]
