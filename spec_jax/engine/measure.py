"""Measure what a round costs at every compiled width, with the very program that will run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import isotonic_regression

from spec_jax.control.cost import CostModel
from spec_jax.engine import devices
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.state import EngineState

_UNWANTED = 1e9
_SHORT, _LONG = 1, 3


def measure_cost(
    engine: Engine,
    params: EngineParams,
    state: EngineState,
    decode: Callable[[EngineParams, EngineState, int], EngineState],
    repeats: int = 3,
) -> CostModel:
    """Median seconds of a round by width.

    Each width is forced by a cost vector that makes all others unattractive, so the controller must weigh cost
    (`Throughput` does) and nothing is compiled for it. A width's cost is what further rounds add to the first one,
    without the time it takes to enter the program; where a wider pass seems the cheaper one, which is noise, both get
    their mean. `state` has to have running rows; it is not changed. Where a mesh spans several processes all get the
    first one's figures, since they choose a width by them.
    """
    endless = dataclasses.replace(
        state.rows,
        limit=jnp.full_like(state.rows.limit, engine.max_len),
        sampling=dataclasses.replace(state.rows.sampling, eos=jnp.full_like(state.rows.sampling.eos, -1)),
        stops=jnp.full_like(state.rows.stops, -1),
    )
    state = dataclasses.replace(state, rows=endless)
    begun = int(state.rows.counters.rounds.max())

    def run(width: int, rounds: int) -> tuple[float, int]:
        cost = jnp.full(len(engine.widths), _UNWANTED, jnp.float32).at[width].set(1.0)
        copy = jax.block_until_ready(jax.tree.map(jnp.copy, state))
        begin = time.perf_counter()
        after = jax.block_until_ready(decode(dataclasses.replace(params, cost=cost), copy, rounds))
        return time.perf_counter() - begin, int(after.rows.counters.rounds.max()) - begun

    seconds = np.zeros((repeats, len(engine.widths)))
    run(0, _SHORT)
    for r in range(repeats):
        for i in range(len(engine.widths)):
            short, few = run(i, _SHORT)
            long, many = run(i, _LONG)
            more = (long - short) / (many - few) if many > few else 0.0
            seconds[r, i] = more if more > 0 else short / few
    median = devices.of_first(engine, isotonic_regression(np.median(seconds, axis=0)).x)
    return CostModel(engine.widths, tuple(float(s) for s in median))
