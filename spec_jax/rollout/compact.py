"""Moving what runs to a smaller batch, and keeping what all rows share: stores, tables, calibration."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spec_jax.control.throughput import Calibration
from spec_jax.engine import rows
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.state import EngineState


def shared_leaves(engine: Engine, params: EngineParams) -> tuple[bool, ...]:
    """Of every leaf of (drafter state, controller state), whether rows share it: its shape is that of any batch."""

    def shapes(batch: int) -> list[tuple[int, ...]]:
        make = lambda p: (engine.drafter.init(p, batch, engine.max_len), engine.controller.init(batch))  # noqa: E731
        return [x.shape for x in jax.tree.leaves(jax.eval_shape(make, params.drafter))]

    return tuple(one == other for one, other in zip(shapes(2), shapes(3), strict=True))


def kept(engine: Engine, params: EngineParams, state: EngineState) -> list[Array]:
    """What all rows share, in order; it outlives a batch."""
    return picked(shared_leaves(engine, params), state)


def picked(shared: Sequence[bool], state: EngineState) -> list[Array]:
    """`kept` with the marks of `shared_leaves` at hand."""
    leaves = jax.tree.leaves((state.drafter, state.controller))
    return [x for x, is_shared in zip(leaves, shared, strict=True) if is_shared]


def with_kept(engine: Engine, params: EngineParams, state: EngineState, arrays: Sequence[Array]) -> EngineState:
    """The state with what rows share taken from elsewhere."""
    leaves, structure = jax.tree.flatten((state.drafter, state.controller))
    given = iter(arrays)
    marks = zip(leaves, shared_leaves(engine, params), strict=True)
    drafter, controller = structure.unflatten([next(given) if is_shared else x for x, is_shared in marks])
    return dataclasses.replace(state, drafter=drafter, controller=controller)


def fresh(engine: Engine, params: EngineParams) -> list[Array]:
    """What rows share before any has run."""
    return kept(engine, params, rows.empty(engine, params, 1))


def faded(engine: Engine, params: EngineParams, arrays: Sequence[Array], left: Float[Array, ""] | float) -> list[Array]:
    """The same arrays, with only a part left of what a controller has counted (`Calibration`)."""
    state = with_kept(engine, params, rows.empty(engine, params, 1), arrays)
    counts = lambda x: isinstance(x, Calibration)  # noqa: E731
    fade = lambda x: jax.tree.map(lambda y: y * left, x) if counts(x) else x  # noqa: E731
    controller = jax.tree.map(fade, state.controller, is_leaf=counts)
    return kept(engine, params, dataclasses.replace(state, controller=controller))


def begin(engine: Engine, params: EngineParams, batch: int, arrays: Sequence[Array]) -> EngineState:
    """A state of empty slots that goes on with what an earlier one kept."""
    return with_kept(engine, params, rows.empty(engine, params, batch), arrays)


def shrink(engine: Engine, params: EngineParams, state: EngineState, batch: int) -> EngineState:
    """The running rows, in their order, in a state of `batch` slots.

    Rows beyond `batch` would be lost: the caller sees to it that no more run.
    """
    running = state.rows.running
    slots = jnp.where(running, jnp.cumsum(running) - 1, batch)
    smaller = begin(engine, params, batch, kept(engine, params, state))
    return rows.insert(engine, smaller, slots, state)


def next_size(sizes: Sequence[int], rows: int) -> int:
    """The smallest of ascending sizes that holds so many rows; the largest if none does."""
    return next((size for size in sizes if size >= rows), sizes[-1])


def check_sizes(sizes: Any) -> tuple[int, ...]:
    """Ascending batch sizes as a tuple; ValueError for anything else."""
    good = isinstance(sizes, tuple | list) and len(sizes) > 0
    good = good and all(isinstance(s, int) and not isinstance(s, bool) and s >= 1 for s in sizes)
    if not good or list(sizes) != sorted(set(sizes)):
        raise ValueError(f"sizes: got {sizes!r}, takes ascending batch sizes of at least 1")
    return tuple(sizes)
