"""Measure what a round costs at every compiled width, with the very program that will run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.control.cost import CostModel
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.state import EngineState

_UNWANTED = 1e9


def measure_cost(
    engine: Engine,
    params: EngineParams,
    state: EngineState,
    decode: Callable[[EngineParams, EngineState, int], EngineState],
    repeats: int = 5,
) -> CostModel:
    """Median seconds of a round by width.

    Each width is forced by a cost vector that makes all others unattractive, so the controller must weigh cost
    (`Throughput` does) and nothing is compiled for it. `state` has to have running rows with room; it is not changed.
    """
    seconds = np.zeros((repeats + 1, len(engine.widths)))
    for r in range(repeats + 1):
        for i in range(len(engine.widths)):
            forced = dataclasses.replace(params, cost=jnp.full(len(engine.widths), _UNWANTED).at[i].set(1.0))
            copy = jax.block_until_ready(jax.tree.map(jnp.copy, state))
            begin = time.perf_counter()
            jax.block_until_ready(decode(forced, copy, 1))
            seconds[r, i] = time.perf_counter() - begin
    return CostModel(engine.widths, tuple(float(s) for s in np.median(seconds[1:], axis=0)))
