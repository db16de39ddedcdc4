"""Rows that come and go: prefill into fresh rows, insert them into slots, copy, close and release."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from spec_jax.drafters.drafter import Committed
from spec_jax.engine import devices
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.state import Counters, EngineState, Finish, Rows
from spec_jax.noise import Keys
from spec_jax.sampling.constraint import FREE, Constraint
from spec_jax.sampling.settings import Sampling, SamplingRow, to_row


@flax.struct.dataclass
class Requests:
    """What a batch of requests brings, as arrays. `requests` builds it from plain values.

    tokens[:, :length] is the text so far, of which the first prompt_length tokens are the prompt (a request that goes
    on from an earlier text has more); limit is the longest text allowed; state is the constraint's behind the prompt.
    """

    tokens: Int[Array, "b text"]
    length: Int[Array, "b"]
    prompt_length: Int[Array, "b"]
    limit: Int[Array, "b"]
    key: Keys
    sampling: SamplingRow
    stops: Int[Array, "b k q"]
    state: Int[Array, "b"]


@devices.on_devices
def empty(engine: Engine, params: EngineParams, batch: int) -> EngineState:
    """A state of `batch` empty slots."""
    d = max(1, engine.drafter.depth)
    zeros = lambda *shape: jnp.zeros((batch, *shape), jnp.int32)  # noqa: E731
    row = to_row(Sampling(), engine.target.vocab_size, (), engine.max_bias, engine.max_eos, batch)
    logs = jnp.zeros((batch, engine.max_len)) if engine.log_probs else None
    rows = Rows(
        tokens=zeros(engine.max_len),
        length=zeros(),
        prompt_length=zeros(),
        limit=zeros(),
        finish=zeros() + Finish.EMPTY,
        key=jnp.zeros((batch, 2), jnp.uint32),
        sampling=row,
        stops=zeros(engine.max_stops, engine.max_stop_length) - 1,
        state=zeros() + FREE,
        counters=Counters(*(zeros() for _ in range(6)), depth_reached=zeros(d), depth_accepted=zeros(d)),
        raw_log_probs=logs,
        log_probs=logs,
    )
    target = engine.target.init_state(params.target, batch, engine.slots)
    drafter = engine.drafter.init(params.drafter, batch, engine.max_len)
    return devices.settled(engine, EngineState(rows, target, drafter, engine.controller.init(batch)))


@devices.on_devices
def init(engine: Engine, params: EngineParams, requests: Requests) -> EngineState:
    """A state whose rows hold the requests, prefilled in chunks up to the anchor. One program for all prompt lengths.

    The anchor (the last token given) is left to the first round, so a text of one token needs no prefill.
    """
    batch, size = requests.tokens.shape
    state = empty(engine, params, batch)
    if size != engine.max_len:
        raise ValueError(f"tokens: got a buffer of {size} tokens a row, takes the engine's max_len {engine.max_len}")
    chunk = engine.prefill_chunk
    tokens = jnp.pad(requests.tokens, ((0, 0), (0, chunk)))
    todo = requests.length - 1

    def body(carry: tuple[Array, Any, Any]) -> tuple[Array, Any, Any]:
        index, target, drafter = carry
        at = index * chunk
        block = lax.dynamic_slice_in_dim(tokens, at, chunk, axis=1)
        count = jnp.clip(todo - at, 0, chunk)
        features, target = engine.target.prefill(params.target, target, block, count)
        after = jnp.minimum(at + count, requests.length - 1)
        committed = Committed(
            tokens=block,
            start=jnp.minimum(at, todo),
            length=count,
            next_token=jnp.take_along_axis(tokens, after[:, None], axis=1)[:, 0],
            path=jnp.broadcast_to(jnp.arange(chunk), (batch, chunk)),
            taps=features,
        )
        return index + 1, target, engine.drafter.observe(params.drafter, drafter, committed)

    start = (jnp.int32(0), state.target, state.drafter)
    # Counted by one: XLA takes a loop with a known bound below its stride for one without turns, and drops it.
    chunks = (todo.max() + chunk - 1) // chunk
    _, target, drafter = lax.while_loop(lambda c: c[0] < chunks, body, start)
    given = {f: getattr(requests, f) for f in Requests.__dataclass_fields__}
    given["state"] = _constraint_state(params.constraint, requests)
    index = jnp.arange(size)
    earlier = (index >= requests.prompt_length[:, None]) & (index < requests.length[:, None])
    unknown = jnp.where(earlier, jnp.nan, 0.0) if engine.log_probs else None
    rows = dataclasses.replace(
        state.rows, **given, finish=_first_finish(engine, requests), raw_log_probs=unknown, log_probs=unknown
    )
    return devices.settled(engine, EngineState(rows, target, drafter, state.controller))


@devices.on_devices
def insert(engine: Engine, state: EngineState, slots: Int[Array, "r"], other: EngineState) -> EngineState:
    """The state with its rows `slots` replaced by the rows of `other`; a slot out of range is left out.

    The controller's state stays that of `state`: it belongs to the batch.
    """
    slots = _in_range(state, slots)
    put = lambda x, y: x.at[slots].set(y, mode="drop")  # noqa: E731
    old, new = engine.target.materialize(state.target), engine.target.materialize(other.target)
    target = engine.target.insert(old, slots, new)
    drafter = engine.drafter.insert(state.drafter, slots, other.drafter)
    rows = jax.tree.map(put, state.rows, other.rows)
    return devices.settled(engine, EngineState(rows, target, drafter, state.controller))


@devices.on_devices
def place(
    engine: Engine, state: EngineState, slots: Int[Array, "r"], one: EngineState, requests: Requests
) -> EngineState:
    """Put a prefilled text (a state of one row, from `init`) into r slots: a prompt sampled r times is prefilled once.

    `requests` has r rows of that text and constraint, each with its own key, settings and limits. A slot out of range
    is left out.
    """
    r, slots = requests.length.shape[0], _in_range(state, slots)
    given = {f: getattr(requests, f) for f in Requests.__dataclass_fields__ if f != "state"}
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (r, *x.shape[1:])), one.rows)
    rows = dataclasses.replace(rows, **given, finish=_first_finish(engine, requests))
    target = engine.target.take(engine.target.materialize(one.target), jnp.zeros(r, jnp.int32))
    drafter = state.drafter
    for i in range(r - 1):
        drafter = engine.drafter.insert(drafter, slots[i : i + 1], one.drafter)
    put = lambda x, y: x.at[slots].set(y, mode="drop")  # noqa: E731
    after = EngineState(
        rows=jax.tree.map(put, state.rows, rows),
        target=engine.target.insert(engine.target.materialize(state.target), slots, target),
        drafter=engine.drafter.insert(drafter, slots[r - 1 :], one.drafter),
        controller=state.controller,
    )
    return devices.settled(engine, after)


def close(state: EngineState, slots: Int[Array, "r"]) -> EngineState:
    """End running requests from outside (a stop string was seen, a client went away); their text stays until released.

    A slot that does not run, or out of range, is left as it is.
    """
    rows = state.rows
    named = jnp.zeros_like(rows.running).at[_in_range(state, slots)].set(True, mode="drop")
    finish = jnp.where(named & rows.running, Finish.CLOSED, rows.finish)
    return dataclasses.replace(state, rows=dataclasses.replace(rows, finish=finish))


@devices.on_devices
def release(engine: Engine, state: EngineState, slots: Int[Array, "r"]) -> EngineState:
    """Free slots; the drafter may keep their texts for later drafts. A slot out of range is left out."""
    rows, slots = state.rows, _in_range(state, slots)
    inside = jnp.minimum(slots, rows.length.shape[0] - 1)
    drafter = engine.drafter.release(state.drafter, slots, rows.tokens[inside], rows.length[inside])
    after = EngineState(
        rows=dataclasses.replace(
            rows,
            finish=rows.finish.at[slots].set(Finish.EMPTY, mode="drop"),
            length=rows.length.at[slots].set(0, mode="drop"),
            state=rows.state.at[slots].set(FREE, mode="drop"),
        ),
        target=engine.target.release(state.target, slots),
        drafter=drafter,
        controller=state.controller,
    )
    return devices.settled(engine, after)


def _in_range(state: EngineState, slots: Array) -> Array:
    """Slots, with those below 0 moved out of range; an index below 0 would count from the end."""
    return jnp.where(slots < 0, state.rows.length.shape[0], slots)


def _constraint_state(constraint: Constraint, requests: Requests) -> Array:
    """The constraint's state behind the tokens that an earlier run generated."""
    begin, end = requests.prompt_length, requests.length

    def body(i: Array, state: Array) -> Array:
        at = begin + i
        token = jnp.take_along_axis(requests.tokens, jnp.minimum(at, end - 1)[:, None], axis=1)[:, 0]
        return jnp.where(at < end, jax.vmap(constraint.step)(state, token), state)

    return lax.fori_loop(0, (end - begin).max(), body, requests.state)


def _first_finish(engine: Engine, requests: Requests) -> Array:
    """RUNNING, or why a request has no room for a single token."""
    limit = jnp.where(requests.limit < engine.max_len, Finish.BUDGET, Finish.MAX_LEN)
    return jnp.where(requests.length < requests.limit, Finish.RUNNING, limit).astype(jnp.int32)
