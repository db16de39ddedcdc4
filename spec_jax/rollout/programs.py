"""The compiled parts of a rollout engine."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from spec_jax.engine import loop, rows
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.state import EngineState
from spec_jax.rollout import compact, memory
from spec_jax.rollout.memory import Memory


class Programs:
    """Prefill at one size; begin, put, decode and settle at each batch size; shrink from one to another."""

    def __init__(self, engine: Engine) -> None:
        """Compile nothing yet."""
        self.prefill = jax.jit(functools.partial(_prefill, engine))
        self.put = jax.jit(functools.partial(_put, engine), donate_argnums=0)
        self.begin = jax.jit(functools.partial(compact.begin, engine), static_argnums=1)
        self.decode = jax.jit(functools.partial(loop.decode, engine), donate_argnums=1)
        self.settle = jax.jit(functools.partial(_settle, engine), donate_argnums=(0, 1))
        self.shrink = jax.jit(functools.partial(compact.shrink, engine), static_argnums=2)

    @property
    def count(self) -> int:
        """Number of compiled programs so far."""
        return sum(f._cache_size() for f in vars(self).values())


def _prefill(
    engine: Engine, params: EngineParams, requests: rows.Requests, recalled: Int[Array, "r m"] | None
) -> EngineState:
    """Prompts prefilled, and their drafter told what is remembered of them."""
    return _told(engine, rows.init(engine, params, requests), recalled)


def _put(
    engine: Engine, state: EngineState, slots: Int[Array, "r"], fresh: EngineState, keys: UInt32[Array, "r 2"]
) -> EngineState:
    """Prefilled prompts in slots, each under a key of its own; a slot out of range is left out."""
    own = dataclasses.replace(fresh, rows=dataclasses.replace(fresh.rows, key=keys))
    return rows.insert(engine, state, slots, own)


def _settle(
    engine: Engine,
    state: EngineState,
    store: Memory | None,
    at: Int[Array, "b"],
    done: Bool[Array, "b"],
    version: Int[Array, ""],
) -> tuple[EngineState, Memory | None]:
    """Finished rows released, their texts remembered, and the rows that go on told of them."""
    r, size = state.rows, done.shape[0]
    if store is not None:
        where = jnp.where(done, at, -1)
        store = memory.remember(store, where, r.tokens, r.prompt_length, r.length, version)
    state = rows.release(engine, state, jnp.where(done, jnp.arange(size), size))
    return _told(engine, state, None if store is None else memory.recall(store, at)), store


def _told(engine: Engine, state: EngineState, recalled: Int[Array, "b m"] | None) -> EngineState:
    if recalled is None:
        return state
    drafter: Any = engine.drafter
    return dataclasses.replace(state, drafter=drafter.recall(state.drafter, recalled))
