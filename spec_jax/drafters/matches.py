"""How far a text's end agrees with what stands before each place of a buffer: the search behind retrieval drafters."""

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

    ring: before the first place stands the last one; the buffer must then hold more than `size` tokens.
    """
    n, size = buffer.shape[0], end.shape[0]
    before = buffer[n - size :] if ring else jnp.full(size, NO_TOKEN, buffer.dtype)
    padded = jnp.concatenate([before, buffer])
    agree, length = jnp.ones(n, bool), jnp.zeros(n, jnp.int32)
    for j in range(size):
        agree = agree & (padded[size - j : size - j + n] == end[j])
        length = length + agree
    return length


def best(agreed: Int[Array, "n"], count: int) -> tuple[Int[Array, "count"], Int[Array, "count"]]:
    """The greatest match lengths and their places, of equals the later first; length 0 where there are no more."""
    n = agreed.shape[0]
    key = jnp.where(agreed > 0, agreed * n + jnp.arange(n, dtype=jnp.int32), 0)
    keys = []
    for _ in range(count):
        keys.append(jnp.max(key))
        key = jnp.where(key == keys[-1], 0, key)
    found = jnp.stack(keys)
    return found // n, found % n


def continuation(tokens: Int[Array, "text"], length: Int[Array, ""], at: Int[Array, ""], k: int) -> Int[Array, "k"]:
    """The k tokens behind place `at` < length - 1 of a text; where the text ends, they go on with themselves."""
    period = jnp.maximum(length - 1 - at, 1)
    return tokens[jnp.clip(at + 1 + jnp.arange(k) % period, 0, tokens.shape[0] - 1)]
