"""What the fault tests share: toy tables and targets, requests as batches, and two compiled runners."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import noise
from spec_jax.drafters.drafter import Drafter
from spec_jax.drafters.none import NoDrafter
from spec_jax.engine import loop, rows
from spec_jax.engine.engine import Engine, EngineParams, Rule
from spec_jax.engine.rows import Requests
from spec_jax.engine.state import EngineState
from spec_jax.models.target import Output
from spec_jax.models.toy import POISON, TableTarget
from spec_jax.sampling.constraint import Constraint
from spec_jax.verify.match import match
from tests.faults.drafters import Follow, Guess, Plan, TableDrafter
from tests.faults.oracle import Logits, Text

ALL = 2**30


def decode_from(engine: Engine, params: EngineParams, requests: Requests, max_rounds: Any) -> EngineState:
    return loop.decode(engine, params, rows.init(engine, params, requests), max_rounds)


# Exact tests run small programs once: compiled without optimisation. Law tests run big batches often: with it, always.
FAST_COMPILE = {"xla_backend_optimization_level": 0}
FAST_RUN = {"xla_backend_optimization_level": 3}
_run = jax.jit(decode_from, static_argnums=0, compiler_options=FAST_COMPILE)
run_many = jax.jit(decode_from, static_argnums=0, compiler_options=FAST_RUN)
jit = functools.partial(jax.jit, compiler_options=FAST_COMPILE)
go_on = jax.jit(loop.decode, static_argnums=(0, 4), compiler_options=FAST_COMPILE)


def run(engine: Engine, params: EngineParams, requests: Requests, max_rounds: int = ALL) -> EngineState:
    return jax.device_get(_run(engine, params, requests, max_rounds))


def run_anew(engine: Engine, params: EngineParams, requests: Requests) -> EngineState:
    """`run` to the end, compiled for this call alone: what is planted in a module is in it, and in no later program."""
    return jax.device_get(jit(lambda p, r: decode_from(engine, p, r, ALL))(params, requests))


# Engines over RowTables: every exact test uses these, so that they compile once.
WORDS = 8
MAX_LEN = 80
ROWS = 100
K = 7
TREE = (-1, 0, 0, 1, 1, 2, 3, 3)


@dataclasses.dataclass(frozen=True)
class RowTables(TableTarget):
    """Each row its own order-2 table, params [B, V, V, V]; logits are NaN where a context token is poison."""

    vocab_size: int = WORDS
    order: int = 2

    def score(self, params, state, tree, staged=None, nodes=None):
        def one(table, slots, length, tokens, parent):
            last = jnp.where(length > 0, slots[jnp.maximum(length - 1, 0)], self.vocab_size - 1)
            before = jnp.where(parent >= 0, tokens[jnp.maximum(parent, 0)], last)
            known = (before >= 0) & (before < self.vocab_size) & (tokens >= 0) & (tokens < self.vocab_size)
            return jnp.where(known[:, None], table[before, tokens], jnp.nan)

        logits = jax.vmap(one)(params, state.slots, state.length, tree.tokens, tree.parent)
        return Output(logits), tree.tokens, state


def row_tables(seed: int, batch: int = ROWS, scale: float = 1.5) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(0, scale, (batch, WORDS, WORDS, WORDS)), jnp.float32)


def logits_of(table: Any) -> Logits:
    """The oracle's view of one row of RowTables."""
    table = np.asarray(table)
    return lambda text: table[text[-2] if len(text) > 1 else WORDS - 1, text[-1]]


def engine(drafter: Drafter | None = None, **changes: Any) -> Engine:
    room = {"max_eos": 2, "max_stops": 2, "max_stop_length": 4, "max_bias": 2}
    sizes = {"max_len": MAX_LEN, "log_probs": True, "prefill_chunk": 8, **room, **changes}
    return Engine(RowTables(), drafter=drafter or NoDrafter(), **sizes)


def engine_params(engine: Engine, target: Any, drafter: Any = None) -> EngineParams:
    return EngineParams(target, drafter, room_for(None, WORDS), jnp.ones(len(engine.widths)))


def room_for(transitions: np.ndarray | None, vocab: int, states: int = 4) -> Constraint:
    """An automaton in a table of fixed size, so that programs with and without one are the same."""
    table = np.zeros((1 + states, vocab), np.int32)
    if transitions is not None:
        table[1 : len(transitions) + 1] = np.where(transitions >= 0, transitions + 1, -1)
    return Constraint(jnp.arange(vocab, dtype=jnp.int32), jnp.asarray(table))


def batch(requests: Sequence[Requests], size: int = ROWS) -> Requests:
    """Requests stacked, and copies of the first up to `size` rows."""
    at = np.array([*range(len(requests)), *[0] * (size - len(requests))])
    return jax.tree.map(lambda *x: jnp.asarray(np.concatenate(x)[at]), *requests)  # in numpy: nothing compiles


def follow(
    tables: Any,
    texts: Sequence[Sequence[int]],
    counts: Any = K,
    length: Any = K,
    k: int = K,
    size: int = ROWS,
    **changes: Any,
) -> tuple[Engine, EngineParams]:
    """An engine whose drafter follows known texts (prompt and continuation), row by row, with chosen accept counts."""
    e = engine(Follow(k, WORDS), **changes)
    return e, engine_params(e, tables, plan(texts, counts, length, size, e.max_len))


def plan(texts: Sequence[Sequence[int]], counts: Any, length: Any, size: int = ROWS, max_len: int = MAX_LEN) -> Plan:
    text = np.zeros((size, max_len), np.int32)
    for row, tokens in zip(text, texts, strict=False):
        row[: len(tokens)] = tokens[:max_len]
    text[len(texts) :] = text[0]
    counts = np.broadcast_to(np.atleast_2d(counts), (size, np.atleast_2d(counts).shape[1]))
    padded = np.tile(counts, MAX_LEN // counts.shape[1] + 1)[:, :MAX_LEN]
    lengths = jnp.broadcast_to(jnp.asarray(length, jnp.int32), (size,))
    return Plan(jnp.asarray(text), jnp.asarray(padded, jnp.int32), lengths)


def tree(tables: Any, rule: Rule = match, **changes: Any) -> tuple[Engine, EngineParams]:
    """An engine whose drafter proposes a tree: children are the likeliest tokens after a token alone.

    Of tokens that tie, even rows propose the first ones and odd rows the last.
    """
    e, tables = engine(TableDrafter(TREE, "point"), rule=rule, **changes), jnp.asarray(tables)
    last_first = jnp.arange(len(tables))[:, None, None] % 2 * jnp.arange(WORDS) * 1e-3
    likely, zero = tables.max(axis=1) + last_first, jnp.int32(0)
    return e, engine_params(e, tables, Guess(likely, likely, jnp.int32(K), zero, zero))


@functools.cache
def _gumbel(positions: int, vocab: int) -> Any:
    ids = jnp.arange(vocab)
    one = jax.vmap(lambda key, t: noise.gumbel(key, t, ids), (None, 0))
    return jax.jit(jax.vmap(lambda key: one(key, jnp.arange(positions))))


def gumbels(keys: Any, positions: int = MAX_LEN, vocab: int = WORDS) -> np.ndarray:
    """The noise of each key, [B, position, token]."""
    return np.asarray(_gumbel(positions, vocab)(jnp.asarray(keys)))


def settled(target: Any, state: Any) -> Any:
    """A target's state, fetched, with nothing pending."""
    return jax.device_get(target.materialize(jax.tree.map(jnp.asarray, state)))


def key_of(seed: int) -> jax.Array:
    return noise.request_key(seed)


def output(state: EngineState, row: int) -> list[int]:
    r = state.rows
    return r.tokens[row, r.prompt_length[row] : r.length[row]].tolist()


def same_text(state: EngineState, row: int, text: Text) -> bool:
    """Tokens, finish and, if recorded, log-probs; and nothing behind the text."""
    r = state.rows
    start, end = int(r.prompt_length[row]), int(r.length[row])
    if output(state, row) != text.tokens or finish(state, row) != text.finish:
        return False
    for got, want in ((r.raw_log_probs, text.raw_log_probs), (r.log_probs, text.log_probs)):
        if got is None:
            continue
        if abs(got[row, start:end] - np.array(want)).max(initial=0.0) > 2e-6 or got[row, end:].any():
            return False
    return not r.tokens[row, end:].any()


def finish(state: EngineState, row: int) -> str:
    """The reason; a text as long as the engine allows counts as one whose budget is spent."""
    name = rows.Finish(int(state.rows.finish[row])).name
    return "BUDGET" if name == "MAX_LEN" else name


def holds_text(state: EngineState, row: int, entries: Any = None) -> bool:
    """Whether the target's state is that of a fresh run on the row's text without its anchor, poison behind it."""
    target, length = state.target, int(state.rows.length[row]) - 1
    want = state.rows.tokens[row, :length] if entries is None else entries
    slots = target.slots[row]
    return target.length[row] == length and (slots[:length] == want).all() and (slots[length:] == POISON).all()
