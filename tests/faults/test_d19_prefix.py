"""D19: rows that share a prefill (a prompt sampled n times is prefilled once) go on exactly as rows prefilled alone.

The drafter is EAGLE-like: its cache at position i needs token i + 1, which at the end of a prefill chunk is not in it.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from spec_jax import noise
from spec_jax.engine import rows
from spec_jax.engine.decoder import Decoder
from spec_jax.engine.requests import request, stack
from spec_jax.models.target import Output
from spec_jax.models.toy import AuditTarget
from spec_jax.sampling.settings import Sampling
from spec_jax.tree import Draft, Tree
from tests.faults import kit
from tests.faults.oracle import generate
from tests.faults.test_d15_audit import LUT, logits, term

K, BATCH, BUDGET, ROUNDS = 3, 5, 30, 40
PROMPT = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 0, 7]
LENGTHS = [1, 2, 4, 5, 6, 12]  # around the edges of prefill chunks of 4
SETTINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=1.0)}
SLOTS = [3, 0, 4, 1]


def pair(token, after):
    return (7 * token + 3 * after + 1) % 97


@flax.struct.dataclass
class Cache:
    """cache[:, :length] holds one entry for every committed token."""

    cache: Array
    length: Array


@dataclasses.dataclass(frozen=True)
class NeedsNext:
    """Its cache decides how many of k drafted tokens are right (by a table of the row's text), so a slip shows."""

    vocab_size: int = kit.WORDS
    nodes: int = K + 1
    depth: int = K
    fault: str = "none"

    def init(self, params: Any, batch: int, max_len: int) -> Cache:
        return Cache(jnp.full((batch, max_len), -1), jnp.zeros(batch, jnp.int32))

    def tap(self, output: Output) -> None:
        return None

    def observe(self, params: Any, state: Cache, committed: Any) -> Cache:
        c, offset = committed, jnp.arange(committed.tokens.shape[1])
        after = jnp.roll(c.tokens, -1, axis=1)
        if self.fault != "next token of the chunk":
            after = jnp.where(offset == c.length[:, None] - 1, c.next_token[:, None], after)
        at = jnp.where(offset < c.length[:, None], state.length[:, None] + offset, state.cache.shape[1])
        write = jax.vmap(lambda old, i, new: old.at[i].set(new, mode="drop"))
        return Cache(write(state.cache, at, pair(c.tokens, after)), state.length + c.length)

    def propose(self, params: Array, state: Cache, context: Any) -> tuple[Draft, Cache]:
        def one(text, cache, used, anchor, length):
            right = jnp.where(jnp.arange(cache.shape[0]) < used, cache, 0).sum() % (K + 1)
            offset = jnp.arange(K)
            tokens = text.at[length + offset].get(mode="fill", fill_value=0)
            tokens = jnp.where(offset < right, tokens, (tokens + 1) % self.vocab_size)
            return Tree(jnp.concatenate([anchor[None], tokens]), jnp.arange(-1, K), jnp.ones(K + 1, bool))

        c = context
        tree = jax.vmap(one)(params, state.cache, state.length, c.anchor, c.length)
        return Draft(tree, jnp.ones(tree.tokens.shape)), state

    def insert(self, state: Cache, slots: Array, other: Cache) -> Cache:
        if self.fault == "not inserted":
            return state
        other = dataclasses.replace(other, length=other.length - (self.fault == "length off by one"))
        return jax.tree.map(lambda x, y: x.at[slots].set(y, mode="drop"), state, other)

    def release(self, state: Cache, slots: Array, tokens: Array, length: Array) -> Cache:
        empty = self.init(None, slots.shape[0], state.cache.shape[1])
        return jax.tree.map(lambda x, y: x.at[slots].set(y, mode="drop"), state, empty)


@dataclasses.dataclass(frozen=True)
class ShortTarget(AuditTarget):
    """Placed one token short."""

    def insert(self, state, rows, other):
        return super().insert(state, rows, dataclasses.replace(other, length=other.length - 1))


def engine(fault="none", target=None):
    e = kit.engine(NeedsNext(fault=fault), log_probs=False, prefill_chunk=4)
    return dataclasses.replace(e, target=target or AuditTarget(kit.WORDS))


@functools.cache
def programs(e):
    empty = functools.partial(rows.empty, e, batch=BATCH)
    made = [functools.partial(f, e) for f in (rows.init, rows.place, rows.insert, rows.release, kit.loop.decode)]
    return [kit.jit(f) for f in (empty, *made)]


def requests_of(e, prompt, sampling):
    return [request(e, prompt, BUDGET, noise.sample_key(kit.key_of(9), i), sampling) for i in range(len(SLOTS))]


def params_of(e, requests, sampling):
    text = np.zeros((BATCH, kit.MAX_LEN), np.int32)
    for slot, r in zip(SLOTS, requests, strict=True):
        prompt = r.tokens[0, : int(r.length[0])].tolist()
        own = generate(logits, prompt, BUDGET, sampling, kit.gumbels(r.key)[0])
        text[slot, : len(prompt) + BUDGET] = [*prompt, *own.tokens]
    return kit.engine_params(e, jnp.asarray(LUT), jnp.asarray(text)), text


def cold(e, params, requests):
    """Every row prefilled alone."""
    empty, init, _, insert, _, _ = programs(e)
    state = empty(params)
    for slot, r in zip(SLOTS, requests, strict=True):
        state = insert(state, jnp.array([slot]), init(params, r))
    return state


def warm(e, params, requests, used=False):
    """Prefilled once, and placed in all slots together; `used`: where other rows were before."""
    empty, init, place, insert, release, decode = programs(e)
    state = empty(params)
    if used:
        others = [request(e, [5, 0, 2, 2, 7, 1, 3], 60, 1 + i) for i in range(BATCH)]
        for slot, r in enumerate(others):
            state = insert(state, jnp.array([slot]), init(params, r))
        state = release(decode(params, state, 7), jnp.arange(BATCH))
    return place(state, jnp.array(SLOTS), init(params, requests[0]), stack(requests))


def history(e, params, state):
    """What a run shows after each round: tokens, accepted counts, and the valid part of both caches."""
    decode, seen = programs(e)[-1], []
    for _ in range(ROUNDS):
        r = state.rows
        inside = lambda x, n: jnp.where(jnp.arange(x.shape[1]) < n[:, None], x, -7)  # noqa: E731
        shown = (
            (r.tokens, r.length),
            r.counters.accepted,
            (inside(state.drafter.cache, state.drafter.length), state.drafter.length),
            (inside(state.target.slots, state.target.length), state.target.length),
        )
        seen.append(jax.device_get(jax.tree.map(lambda x: x[jnp.array(SLOTS)], shown)))
        state = decode(params, state, 1)
    return seen, jax.device_get(state)


def same(one, other):
    return all(
        (a == b).all()
        for x, y in zip(one, other, strict=True)
        for a, b in zip(*map(jax.tree.leaves, (x, y)), strict=True)
    )


@pytest.mark.parametrize("used", [False, True], ids=["fresh slots", "used slots"])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("length", LENGTHS)
def test_warm_is_cold(length, name, used):
    e, prompt = engine(), PROMPT[:length]
    requests = requests_of(e, prompt, SETTINGS[name])
    params, text = params_of(e, requests, SETTINGS[name])
    seen, state = history(e, params, cold(e, params, requests))
    assert same(seen, history(e, params, warm(e, params, requests, used))[0])
    for slot in SLOTS:
        whole = text[slot, : length + BUDGET].tolist()
        assert kit.output(state, slot) == whole[length:]
        assert kit.holds_text(state, slot, [term(t, i) for i, t in enumerate(whole[:-1])])
        assert state.drafter.cache[slot, : len(whole) - 1].tolist() == [
            pair(*ab) for ab in zip(whole, whole[1:], strict=False)
        ]
    counts = np.stack([s[1] for s in seen])
    assert len(set(np.diff(counts, axis=0).ravel().tolist())) > 2


@pytest.mark.parametrize("fault", ["length off by one", "not inserted", "next token of the chunk"])
def test_a_drafter_that_starts_warm_with_a_slip_is_caught(fault):
    good, bad = engine(), engine(fault)
    requests = requests_of(good, PROMPT, SETTINGS["greedy"])
    params, _ = params_of(good, requests, SETTINGS["greedy"])
    seen = history(good, params, cold(good, params, requests))[0]
    assert not same(seen, history(bad, params, warm(bad, params, requests, used=True))[0])


def test_a_target_that_starts_warm_one_token_short_is_caught():
    good, bad = engine(), engine(target=ShortTarget(kit.WORDS))
    requests = requests_of(good, PROMPT, SETTINGS["greedy"])
    params, _ = params_of(good, requests, SETTINGS["greedy"])
    seen = history(good, params, cold(good, params, requests))[0]
    assert not same(seen, history(bad, params, warm(bad, params, requests))[0])


@pytest.mark.parametrize("name", SETTINGS)
def test_samples_of_one_prompt_through_the_decoder(name):
    """n samples at once, in fewer slots than samples, against n requests of their own."""
    e, sampling = engine(), SETTINGS[name]
    tables = params_of(e, requests_of(e, PROMPT, sampling), sampling)[1]
    together = Decoder(e, jnp.asarray(LUT), jnp.asarray(tables[[0, 0]]), batch=2)
    alone = Decoder(e, jnp.asarray(LUT), jnp.asarray(tables[[0, 0]]), batch=2)
    got = together.generate([PROMPT], BUDGET, n=4, key=9, sampling=sampling)
    for i, result in enumerate(got):
        key = noise.sample_key(kit.key_of(9), i)
        (want,) = alone.generate([PROMPT], BUDGET, key=key, sampling=sampling)
        assert (result.tokens, result.counters) == (want.tokens, want.counters)
    assert len({r.tokens for r in got}) == (1 if sampling.temperature == 0 else 4)
