"""The state check: after forced rejections at every position, the state must be that of a fresh run on the text."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from spec_jax.drafters.scripted import Script, Scripted
from spec_jax.engine import loop, rows
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.requests import request, stack
from spec_jax.models.target import Target
from spec_jax.sampling.constraint import free
from spec_jax.tree import Tree


@dataclasses.dataclass(frozen=True)
class StateReport:
    """What the state check found.

    rounds were run with the accepted counts listed; text_equal: the text was plain decoding's in all of them; error:
    the largest logit difference, over probe tokens scored from the speculative state and from a fresh one.
    """

    accepted: tuple[tuple[int, ...], ...]
    text_equal: bool
    error: float


def check_state(
    target: Target, params: Any, prompt: Sequence[int], k: int = 3, rounds: int = 4, patterns: int = 16, seed: int = 0
) -> StateReport:
    """Force accepted counts 0 .. k in many orders (a row each), greedy, and probe the state after every round.

    With patterns at least (k + 1) ** rounds all orders are run, otherwise that many, drawn by the seed.
    """
    every = np.stack(np.meshgrid(*[np.arange(k + 1)] * rounds, indexing="ij"), -1).reshape(-1, rounds)
    if patterns < len(every):
        every = every[np.random.default_rng(seed).choice(len(every), patterns, replace=False)]
    budget = rounds * (k + 1)
    plain = Engine(target, len(prompt) + budget + k + 1)
    start = EngineParams(params, None, free(target.vocab_size), jnp.ones(1))
    one = stack([request(plain, prompt, budget + k + 1)])
    text = _decode(plain, start, _init(plain, start, one), None).rows.tokens[0]
    engine = Engine(target, plain.max_len, drafter=Scripted(k, target.vocab_size))
    batch = len(every)
    right = np.zeros((batch, engine.max_len), np.int32)
    for row, counts in zip(right, every, strict=True):
        row[len(prompt) + np.cumsum([0, *(counts[:-1] + 1)])] = counts
    script = Script(jnp.broadcast_to(text, right.shape), jnp.asarray(right))
    speculative = EngineParams(params, script, start.constraint, jnp.ones(1))
    state = _init(engine, speculative, stack([one] * batch))
    same, error, length = True, 0.0, np.full(batch, len(prompt))
    for i in range(rounds):
        state = _decode(engine, speculative, state, 1)
        length = length + every[:, i] + 1
        same &= bool((np.asarray(state.rows.length) == length).all())
        inside = np.arange(engine.max_len) < length[:, None]
        same &= bool((np.where(inside, state.rows.tokens, 0) == np.where(inside, text, 0)).all())
        error = max(error, _probe_error(engine, speculative, state, seed + i))
    return StateReport(tuple(tuple(int(c) for c in row) for row in every), same, error)


def _probe_error(engine: Engine, params: EngineParams, state: Any, seed: int) -> float:
    """Largest logit difference of a random tree scored from the state and from a fresh prefill of the same text."""
    r, target, batch = state.rows, engine.target, state.rows.length.shape[0]
    given = {f: getattr(r, f) for f in rows.Requests.__dataclass_fields__}
    fresh = _init(engine, params, rows.Requests(**given))
    rng = np.random.default_rng(seed)
    parent = np.array([-1, 0, 0, 1, 2])
    tokens = jnp.asarray(rng.integers(0, target.vocab_size, (batch, len(parent))), jnp.int32)
    tree = Tree(tokens, jnp.broadcast_to(jnp.asarray(parent), tokens.shape), jnp.ones(tokens.shape, bool))
    a, b = (_logits(target, params.target, s.target, tree) for s in (state, fresh))
    return float(jnp.max(jnp.where(a == b, 0.0, jnp.abs(a - b))))


@functools.partial(jax.jit, static_argnums=0)
def _logits(target: Target, params: Any, state: Any, tree: Tree) -> Array:
    return target.score(params, target.materialize(state), tree)[0].logits


_init = jax.jit(rows.init, static_argnums=0)
_decode = jax.jit(loop.decode, static_argnums=0)
