"""Which of several writers has an entry of a table, whatever their order."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int, Integer


def winners(entry: Int[Array, "m"], entries: int, *orders: Int[Array, "m"]) -> Int[Array, "m"]:
    """Each writer's entry, or `entries` for one that loses it; an `entry` of `entries` is out from the start.

    Of several for one entry those of the greatest number stay, by the first of the orders, then by the next; equals
    stay together. Numbers are at least 0.
    """
    for order in orders:
        top = jnp.full(entries, -1, jnp.int32).at[entry].max(order, mode="drop")
        entry = jnp.where(top.at[entry].get(mode="fill", fill_value=-1) == order, entry, entries)
    return entry


def hashed(words: Integer[Array, "*b k"]) -> Int[Array, "*b"]:
    """A number in [0, 2^30) of each row of words (FNV-1a over whole words)."""
    code = jnp.full(words.shape[:-1], 2166136261, jnp.uint32)
    for i in range(words.shape[-1]):
        code = (code ^ words[..., i].astype(jnp.uint32)) * jnp.uint32(16777619)
    return (code >> 2).astype(jnp.int32)
