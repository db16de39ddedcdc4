"""Law tests: tables RND and ADV, engines over them, and strings sampled with many keys."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.drafters.drafter import Context
from spec_jax.engine.engine import Engine, EngineParams, Rule
from spec_jax.engine.requests import request
from spec_jax.engine.state import EngineState
from spec_jax.models.toy import TableTarget
from spec_jax.sampling.constraint import Constraint
from spec_jax.sampling.history import from_text
from spec_jax.sampling.settings import Sampling, SamplingRow, to_row
from spec_jax.verify.rejection import rejection
from spec_jax.verify.scores import Scores
from tests.faults import kit
from tests.faults.drafters import NOISES, Guess, TableDrafter
from tests.faults.laws import Fit, fit
from tests.faults.oracle import Grammar, law, strings

V = 5
START = 5
ROWS = 50_000
CHAIN = (-1, 0, 1)
P = [0.1, 0.1, 0.1, 0.35, 0.35]
Q = [0.6, 0.05, 0.05, 0.29, 0.01]
PLAIN = Sampling(temperature=1.0)


def _rnd() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    target = rng.normal(0, 1.2, (V + 1, V))
    return target, 0.6 * target + rng.normal(0, 0.9, (V + 1, V))


def _adv() -> tuple[np.ndarray, np.ndarray]:
    order = np.stack([np.random.default_rng(i).permutation(V) for i in range(V + 1)])
    return np.log(np.array(P)[order]), np.log(np.array(Q)[order])


# Target and drafter, each [V + 1, V] logits; row V starts a text.
TABLES = {"RND": _rnd(), "ADV": _adv()}


def table(rows: Any) -> jax.Array:
    """As TableTarget reads it: token V only starts a text and is never emitted."""
    return jnp.asarray(np.concatenate([rows, np.full((V + 1, 1), -np.inf)], axis=1), jnp.float32)


SIZES = {"max_len": 8, "prefill_chunk": 4, "max_eos": 1, "max_stops": 1, "max_stop_length": 1, "max_bias": 2}
ENGINE = Engine(TableTarget(V + 1), drafter=TableDrafter(CHAIN, "sampled"), rule=rejection, **SIZES)


def guess(
    draft: Any, sampling: Sampling, said: Sampling | None = None, k: int = 2, noise: str = "own", tag: int = 0
) -> Guess:
    """A TableDrafter's parameters: it draws with `sampling` and says that it drew with `said` (None: the same)."""
    with np.errstate(divide="ignore"):
        tables = [table(np.log([law(z, s) for z in draft])) for s in (sampling, said or sampling)]
    return Guess(*tables, jnp.int32(k), jnp.int32(NOISES.index(noise)), jnp.int32(tag))


def sample(
    target: Any,
    drafter: Guess,
    sampling: Sampling,
    n: int,
    calls: int = 1,
    eos: Sequence[int] = (),
    grammar: Grammar | None = None,
    max_rounds: int = kit.ALL,
    order: Any = slice(None),
) -> tuple[np.ndarray, EngineState]:
    """Texts [calls x ROWS, n] of independent keys, -1 behind their end, and the last call's state; by the p/q rule."""
    transitions, start = grammar or (None, -1)
    params = EngineParams(table(target), drafter, kit.room_for(transitions, V + 1), jnp.ones(1))
    one = request(ENGINE, [START], n, sampling=sampling, eos=eos, constraint_start=start + 1)
    requests = jax.tree.map(lambda x: jnp.broadcast_to(x, (ROWS, *x.shape[1:])), one)
    texts = []
    for keys in keys_of(calls):
        state = jax.device_get(kit.run_many(ENGINE, params, requests.replace(key=keys[order]), max_rounds))
        written = np.arange(n) < (state.rows.length - 1)[:, None]
        texts.append(np.where(written, state.rows.tokens[:, 1 : 1 + n], -1))
    return np.concatenate(texts), state


def sample_rule(
    rule: Rule, target: Any, drafter: Guess, sampling: Sampling, calls: int = 1, grammar: Grammar | None = None
) -> np.ndarray:
    """Texts [calls x ROWS, 3] of independent keys by a rule alone, without an engine."""
    transitions, start = grammar or (None, -1)
    row, bound = to_row(sampling, V + 1, (), 2, 1), kit.room_for(transitions, V + 1)
    given = (rule, table(target), drafter, row, bound, jnp.int32(start + 1))
    return np.concatenate([np.asarray(_texts(*given, keys)) for keys in keys_of(calls)])


def law_of(
    target: Any, sampling: Sampling, n: int = 3, eos: Sequence[int] = (), grammar: Grammar | None = None
) -> dict[tuple[int, ...], float]:
    """The exact law of the first n tokens."""
    return strings(lambda text: np.append(target[text[-1]], -np.inf), (START,), n, sampling, eos, grammar)


def gate(target: Any, drafter: Guess, sampling: Sampling = PLAIN, n: int = 3, calls: int = 1, **how: Any) -> Fit:
    """Texts of the p/q rule in an engine, against their exact law."""
    return fit(sample(target, drafter, sampling, n, calls, **how)[0], law_of(target, sampling, n, **how))


def gate_rule(rule: Rule, target: Any, drafter: Guess, sampling: Sampling = PLAIN, calls: int = 1, **how: Any) -> Fit:
    """Texts of a rule alone, against their exact law."""
    return fit(sample_rule(rule, target, drafter, sampling, calls, **how), law_of(target, sampling, **how))


@functools.cache
def keys_of(calls: int) -> list[jax.Array]:
    return [jnp.asarray(np.random.default_rng(i).integers(0, 2**32, (ROWS, 2), dtype=np.uint32)) for i in range(calls)]


@functools.partial(jax.jit, static_argnums=0, compiler_options=kit.FAST_RUN)
def _texts(
    rule: Rule,
    target: jax.Array,
    drafter: Guess,
    row: SamplingRow,
    bound: Constraint,
    start: jax.Array,
    keys: jax.Array,
) -> jax.Array:
    size, proposer = 8, TableDrafter(CHAIN, "sampled")
    sampling = jax.tree.map(lambda x: jnp.broadcast_to(x, (ROWS, *x.shape)), row)
    one, yes = jnp.ones(ROWS, jnp.int32), jnp.bool_(True)

    def verify(key, draft, row, text, length, state):
        past = from_text(text, jnp.int32(1), length, state, V + 1)
        return rule(key, draft, Scores(target[draft.tree.tokens], row, past, length, bound), 3)

    def body(_, carry):
        tokens, length, state = carry
        context = Context(tokens, length, one, one, one > 0, keys, sampling, state, bound, yes, yes)
        draft, _ = proposer.propose(drafter, (), context)
        verdict = jax.vmap(verify)(keys, draft, sampling, tokens, length, state)
        at = jnp.where(jnp.arange(3) <= verdict.accepted[:, None], length[:, None] + jnp.arange(3), size)
        tokens = jax.vmap(lambda t, i, x: t.at[i].set(x, mode="drop"))(tokens, at, verdict.tokens)
        state = jnp.take_along_axis(verdict.states, verdict.accepted[:, None], axis=1)[:, 0]
        return tokens, length + verdict.accepted + 1, state

    carry = (jnp.full((ROWS, size), START), one, one * start)
    return jax.lax.fori_loop(0, 3, body, carry)[0][:, 1:4]
