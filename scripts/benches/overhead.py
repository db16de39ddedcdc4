"""What part of a round is not the target pass: the same rounds timed whole, and their target passes alone."""

from __future__ import annotations

import functools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spec_jax.engine import loop, rows
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.requests import request
from spec_jax.sampling.settings import Sampling
from spec_jax.tree import Tree

from .ratios import in_turn


class Overhead:
    """The programs of one engine, compiled once for all sampling settings."""

    def __init__(self, engine: Engine, params: EngineParams) -> None:
        self._engine, self._params = engine, params
        self._init = jax.jit(functools.partial(rows.init, engine))
        self._decode = jax.jit(functools.partial(loop.decode, engine, until_any_finishes=True), donate_argnums=1)
        self._passes = jax.jit(self._passes_of)

    def measure(self, prompt: tuple[int, ...], sampling: Sampling, quick: bool = False) -> float:
        """1 - (time of the target passes) / (time of the rounds), median of several, for the first rounds of a prompt.

        The rounds are recorded first, to know how wide each pass was; the passes are then run alone, in that order, at
        the text lengths they had.
        """
        engine, params = self._engine, self._params
        count, repeats = (4, 3) if quick else (24, 9)
        budget = min(count * engine.block, engine.max_len - len(prompt))
        start = self._init(params, request(engine, prompt, budget, sampling=sampling))
        copy = lambda: jax.tree.map(jnp.copy, start)  # noqa: E731
        widths, lengths, state = [], [], copy()
        while len(widths) < count and bool(state.rows.running[0]):
            before = int(state.rows.counters.scored[0])
            lengths.append(int(state.rows.length[0]) - 1)
            state = self._decode(params, state, 1)
            widths.append(engine.widths.index(int(state.rows.counters.scored[0]) - before))
        live = len(widths)
        pad = lambda x: jnp.asarray(x + [0] * (count - live))  # noqa: E731
        seconds = in_turn(
            {
                "rounds": lambda fresh: self._decode(params, fresh, live).rows.length,
                "passes": lambda _: self._passes(params, state.target, pad(widths), pad(lengths), live),
            },
            repeats,
            setup=lambda: (copy(),),
        )
        return 1 - statistics.median(np.array(seconds["passes"]) / np.array(seconds["rounds"]))

    def _passes_of(self, params: EngineParams, target: Any, order: Any, lengths: Any, count: Any) -> Any:
        branches = [lambda n, w=w: self._score(w, target, n, params) for w in self._engine.widths]
        step = lambda i, total: total + lax.switch(order[i], branches, lengths[i])  # noqa: E731
        return lax.fori_loop(0, count, step, 0.0)

    def _score(self, width: int, target: Any, length: Any, params: EngineParams) -> Any:
        parent = jnp.arange(-1, width - 1)[None]
        tree = Tree(jnp.ones_like(parent), parent, jnp.ones(parent.shape, bool))
        moved = target.replace(length=target.length * 0 + length)
        output, staged, _ = self._engine.target.score(params.target, moved, tree)
        logits, staged = lax.optimization_barrier((output.logits, staged))
        return logits.max() + sum(x.sum() for x in jax.tree.leaves(staged))
