"""The attention state backend: a key/value cache per layer, staged tree rows, and their commit.

Scoring a tree never writes the cache. Each node attends to the committed prefix (a length, no mask) and to its
ancestors in the tree (an N x N block); its own key and value rows are staged. Commit gathers the rows of the accepted
path and writes them behind the prefix, so there is nothing to roll back.

A layer with a sliding window keeps a ring: text position p is in slot p mod slots, so which position a slot holds
follows from the length. Nothing but accepted rows is ever written there, hence a ring needs no room for a draft.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

_SUBLANES, _LANES = 8, 128


def kept_slots(slots: int, window: int | None) -> int:
    """How many of a text's `slots` a layer keeps: all, or with a window the last window - 1, which the next node sees.

    Rounded up for the kernels: to a multiple of 8, and of 128 where there are more than 120.
    """
    if window is None:
        return slots
    unit = _SUBLANES if window - 1 <= _LANES - _SUBLANES else _LANES
    return min(slots, -(-max(window - 1, 1) // unit) * unit)


def held(slot: Int[Array, "*s"], length: Int[Array, "*b"], slots: int, sinks: int = 0) -> Int[Array, "*r"]:
    """The text position that a slot holds when the text is `length` long; below 0 where there is none.

    The first `sinks` positions stay, and the other slots are the ring.
    """
    size = max(slots - sinks, 1)
    behind = slot + (length - 1 - slot) // size * size
    return jnp.where(slot < sinks, jnp.where(slot < length, slot, -1), jnp.where(behind >= sinks, behind, -1))


def commit(
    cache: Float[Array, "b kv s d"],
    staged: Float[Array, "b kv n d"],
    path: Int[Array, "b m"],
    length: Int[Array, "b"],
    count: Int[Array, "b"],
    room: int,
) -> Float[Array, "b kv s d"]:
    """Move a cache forward by the first `count` nodes of each row's path.

    It is a ring if it has fewer slots than the text has room for.
    """
    if cache.shape[2] < room:
        return commit_ring(cache, staged, path, length, count)
    return commit_rows(cache, staged, path, length)


def commit_rows(
    cache: Float[Array, "b kv s d"], staged: Float[Array, "b kv n d"], path: Int[Array, "b m"], length: Int[Array, "b"]
) -> Float[Array, "b kv s d"]:
    """Write the staged rows along each row's path to cache slots length .. length + m - 1.

    The cache keeps m spare slots behind its longest text, so that the write never clamps; rows past the accepted part
    are overwritten by the next commit before anything reads them.
    """
    rows = jnp.take_along_axis(staged, path[:, None, :, None], axis=2).astype(cache.dtype)
    return _put(cache, rows, length)


def commit_ring(
    cache: Float[Array, "b kv s d"],
    staged: Float[Array, "b kv n d"],
    path: Int[Array, "b m"],
    length: Int[Array, "b"],
    count: Int[Array, "b"],
    sinks: int = 0,
) -> Float[Array, "b kv s d"]:
    """Write the first `count` staged rows along each row's path around a ring, and nothing else.

    Rows go to the m slots from the first free one on, and where the ring ends to those behind the sinks; of more rows
    than slots the last stay.
    """
    s, m = cache.shape[2], path.shape[1]
    first = jnp.where(length < s, length, sinks + (length - sinks) % max(s - sinks, 1))
    parts = [jnp.zeros_like(first)] if m >= s else [first, jnp.full_like(first, sinks)]
    for start in parts:
        start = jnp.minimum(start, max(s - m, 0))
        slot = start[:, None] + jnp.arange(min(m, s))
        offset = held(slot, (length + count)[:, None], s, sinks) - length[:, None]
        node = jnp.take_along_axis(path, jnp.clip(offset, 0, m - 1), axis=1)
        rows = jnp.take_along_axis(staged, node[:, None, :, None], axis=2).astype(cache.dtype)
        new = (offset >= 0)[:, None, :, None]
        cache = _put(cache, jnp.where(new, rows, _cut(cache, start, slot.shape[1])), start)
    return cache


def _cut(cache: Array, start: Array, size: int) -> Array:
    """Each row's slots start .. start + size - 1."""
    if size == cache.shape[2]:
        return cache
    if cache.shape[0] == 1:
        return lax.dynamic_slice_in_dim(cache, start[0], size, axis=2)
    return jax.vmap(lambda c, at: lax.dynamic_slice_in_dim(c, at, size, axis=1))(cache, start)


def _put(cache: Array, rows: Array, start: Array) -> Array:
    """The rows in each row's slots from `start` on.

    One after another in a loop: as a scatter, XLA for TPUs copies the whole cache where a row writes a single slot.
    """
    if rows.shape == cache.shape:
        return rows

    def one(i: Array | int, cache: Array) -> Array:
        own = lax.dynamic_slice_in_dim(rows, i, 1)
        return lax.dynamic_update_slice(cache, own, (i, 0, start[i], 0))

    return one(0, cache) if cache.shape[0] == 1 else lax.fori_loop(0, cache.shape[0], one, cache)
