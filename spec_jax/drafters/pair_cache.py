"""Keys and values of committed pairs as the state of a head: what it commits, and which rows it drops."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax.models.llama import AttentionState, StagedRows


class PairCache:
    """These parts of a `Head` whose state is an `AttentionState` with room for all of a text."""

    def commit(self, state: AttentionState, staged: StagedRows, length: Int[Array, "b"]) -> AttentionState:
        """The first `length` pairs behind the others."""
        slots, offset = state.k[0].shape[2], jnp.arange(staged.k[0].shape[2])
        slot = jnp.where(offset < length[:, None], state.length[:, None] + offset, slots)
        one = lambda to, x, at: to.at[:, at].set(x.astype(to.dtype), mode="drop")  # noqa: E731
        pairs = lambda caches, new: zip(caches, new, strict=True)  # noqa: E731
        put = lambda caches, new: tuple(jax.vmap(one)(*p, slot) for p in pairs(caches, new))  # noqa: E731
        return AttentionState(put(state.k, staged.k), put(state.v, staged.v), state.length + length, state.room)

    def insert(self, state: AttentionState, rows: Int[Array, "r"], other: AttentionState) -> AttentionState:
        """Rows replaced."""
        return jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), state, other)

    def release(self, state: AttentionState, rows: Int[Array, "r"]) -> AttentionState:
        """Rows emptied."""
        return dataclasses.replace(state, length=state.length.at[rows].set(0, mode="drop"))


def empty(config: Any, batch: int, room: int, dtype: Any) -> AttentionState:
    """No pairs, for a config's num_layers, num_kv_heads and head_dim."""
    shape = (batch, config.num_kv_heads, room, config.head_dim)
    caches = lambda: tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))  # noqa: E731
    return AttentionState(caches(), caches(), jnp.zeros(batch, jnp.int32), room)
