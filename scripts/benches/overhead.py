"""What part of a round is not the target pass: the same rounds timed whole, and their target passes alone."""

from __future__ import annotations

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


def round_overhead(
    engine: Engine, params: EngineParams, prompt: tuple[int, ...], sampling: Sampling, quick: bool = False
) -> float:
    """1 - (time of the target passes) / (time of the rounds), median of several, for the first rounds of a prompt.

    The rounds are recorded first, to know how wide each pass was; the passes are then run alone, in that order, at the
    text lengths they had.
    """
    count, repeats = (8, 3) if quick else (24, 9)
    budget = min(count * engine.block, engine.max_len - len(prompt))
    init = jax.jit(rows.init, static_argnums=0)
    start = init(engine, params, request(engine, prompt, budget, sampling=sampling))
    decode = jax.jit(lambda p, s, n: loop.decode(engine, p, s, n))
    widths, lengths, state = [], [], start
    while len(widths) < count and bool(state.rows.running[0]):
        before = int(state.rows.counters.scored[0])
        lengths.append(int(state.rows.length[0]) - 1)
        state = decode(params, state, 1)
        widths.append(engine.widths.index(int(state.rows.counters.scored[0]) - before))
    order, at = jnp.asarray(widths), jnp.asarray(lengths)

    def score(width: int, target: Any, length: Any, p: EngineParams) -> Any:
        parent = jnp.arange(-1, width - 1)[None]
        tree = Tree(jnp.ones_like(parent), parent, jnp.ones(parent.shape, bool))
        output, staged, _ = engine.target.score(p.target, target.replace(length=target.length * 0 + length), tree)
        whole = lax.optimization_barrier((output.logits, staged))
        return output.logits.max() + sum(x.sum() for x in jax.tree.leaves(whole[1]))

    @jax.jit
    def passes(p: EngineParams, target: Any) -> Any:
        branches = [lambda n, w=w: score(w, target, n, p) for w in engine.widths]
        step = lambda total, x: (total + lax.switch(x[0], branches, x[1]), None)  # noqa: E731
        return lax.scan(step, 0.0, (order, at))[0]

    seconds = in_turn(
        {
            "rounds": lambda: decode(params, start, len(widths)).rows.length,
            "passes": lambda: passes(params, state.target),
        },
        repeats,
    )
    return 1 - statistics.median(np.array(seconds["passes"]) / np.array(seconds["rounds"]))
