"""D19 for recurrent targets: rows that share a prefill go on as rows prefilled alone, also where other rows are running
with accepted tokens still pending. The integer recurrence, and a hybrid drafted for by its MTP head.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.drafters import mtp
from spec_jax.engine.requests import request, stack
from spec_jax.models.gated_attention import KeyValues
from spec_jax.models.toy import audit_table
from tests.drafters.hybrid import fair
from tests.faults import kit
from tests.faults.oracle import generate
from tests.faults.recurrence import AuditRecurrence, fresh, logits_of
from tests.faults.test_d19_prefix import (
    BATCH,
    BUDGET,
    PROMPT,
    SETTINGS,
    SLOTS,
    NeedsNext,
    cold,
    pair,
    programs,
    requests_of,
    same,
    warm,
)

LUT = audit_table(kit.WORDS, seed=18)
OTHER = [2, 7, 1, 1, 3]


def audit(fault="none", target=None):
    e = kit.engine(NeedsNext(fault=fault), log_probs=False, prefill_chunk=4)
    return dataclasses.replace(e, target=target or AuditRecurrence(kit.WORDS))


def audit_params(e, prompts, requests, sampling):
    """The engine's parameters, and every slot's text."""
    text = np.zeros((BATCH, kit.MAX_LEN), np.int32)
    for slot, prompt, r in zip(SLOTS, prompts, requests, strict=True):
        own = generate(logits_of(LUT), prompt, BUDGET, sampling, kit.gumbels(r.key)[0])
        text[slot, : len(prompt) + BUDGET] = [*prompt, *own.tokens]
    return kit.engine_params(e, LUT, jnp.asarray(text)), text


def audit_view(e, state):
    now, cache = e.target.materialize(state.target), state.drafter
    inside = jnp.arange(cache.cache.shape[1]) < cache.length[:, None]
    return now.s, now.window, now.length, jnp.where(inside, cache.cache, -7), cache.length


@functools.cache
def model():
    target, params = fair(vocab_size=kit.WORDS)
    target = mtp.tapped(target)
    e = kit.engine(mtp.drafter(target, mtp.chain(3), mtp.Window(9, sinks=2)), log_probs=False, prefill_chunk=4)
    e = dataclasses.replace(e, target=target)
    return e, kit.engine_params(e, params, mtp.params(params))


def model_view(e, state):
    def live(rows, length):
        seen = (jnp.arange(rows.k.shape[2]) < length[:, None])[:, None, :, None]
        return jnp.where(seen, rows.k, 0), jnp.where(seen, rows.v, 0)

    now, drafter = e.target.materialize(state.target), state.drafter
    parts = [live(own, now.length) if isinstance(own, KeyValues) else (own.recurrent, own.conv) for own in now.layers]
    return parts, now.length, live(drafter.head.rows, drafter.head.length), drafter.head.length, drafter.context


def history(e, params, state, view, rounds):
    """What a run shows after each round: tokens, accepted counts, the target's state and the drafter's."""
    decode, seen = programs(e)[-1], []
    for _ in range(rounds):
        seen.append(jax.device_get(shown(view, e, state)))
        state = decode(params, state, 1)
    return seen, jax.device_get(state)


@functools.partial(kit.jit, static_argnums=(0, 1))
def shown(view, e, state):
    r = state.rows
    return jax.tree.map(lambda x: x[jnp.array(SLOTS)], (r.tokens, r.length, r.counters.accepted, view(e, state)))


@pytest.mark.parametrize("used", [False, True], ids=["fresh slots", "used slots"])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("length", [1, 2, 5, 12])
def test_warm_is_cold_with_an_integer_recurrence(length, name, used):
    e, prompt = audit(), PROMPT[:length]
    requests = requests_of(e, prompt, SETTINGS[name])
    params, text = audit_params(e, [prompt] * len(SLOTS), requests, SETTINGS[name])
    seen, state = history(e, params, cold(e, params, requests), audit_view, 30)
    assert same(seen, history(e, params, warm(e, params, requests, used), audit_view, 30)[0])
    for slot in SLOTS:
        assert goes_right(e, state, slot, text[slot, : length + BUDGET].tolist(), length)


def goes_right(e, state, slot, whole, start):
    """Text, recurrent state, window and the drafter's cache, at the end of the text."""
    now = kit.settled(e.target, state.target)
    return (
        kit.output(state, slot) == whole[start:]
        and (int(now.s[slot]), now.window[slot].tolist()) == fresh(whole[:-1])
        and state.drafter.cache[slot, : len(whole) - 1].tolist()
        == [pair(*ab) for ab in zip(whole, whole[1:], strict=False)]
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_warm_is_cold_with_an_mtp_head(name):
    e, params = model()
    for used in (False, True):
        requests = requests_of(e, PROMPT, SETTINGS[name])
        seen, state = history(e, params, cold(e, params, requests), model_view, 16)
        assert same(seen, history(e, params, warm(e, params, requests, used), model_view, 16)[0])
    accepted = np.asarray(state.rows.counters.accepted)[np.array(SLOTS)]
    assert (accepted > 0).all()


@dataclasses.dataclass(frozen=True)
class Forgetful(AuditRecurrence):
    """Rows that are placed into it cost the others what they have pending."""

    def insert(self, state, rows, other):
        put = lambda x, y: x.at[rows].set(y, mode="drop")  # noqa: E731
        lost = dataclasses.replace(state, pending=jnp.zeros_like(state.pending), count=jnp.zeros_like(state.count))
        return jax.tree.map(put, lost, other)

    def materialize(self, state):
        return state if state.pending is not None else super().materialize(state)


def arrivals(target=None):
    """Two rows begin; three rounds later two others are placed beside them. Whether each row is right in the end."""
    e = audit(target=target)
    empty, init, place, _, _, decode = programs(e)
    prompts = [PROMPT, PROMPT, OTHER, OTHER]
    requests = [request(e, p, BUDGET, i) for i, p in enumerate(prompts)]
    params, text = audit_params(e, prompts, requests, SETTINGS["greedy"])
    state = place(empty(params), jnp.array(SLOTS[:2]), init(params, requests[0]), stack(requests[:2]))
    state = decode(params, state, 3)
    state = place(state, jnp.array(SLOTS[2:]), init(params, requests[2]), stack(requests[2:]))
    state = jax.device_get(decode(params, state, 60))
    true = audit()
    return [
        goes_right(true, state, slot, text[slot, : len(p) + BUDGET].tolist(), len(p))
        for slot, p in zip(SLOTS, prompts, strict=True)
    ]


def test_rows_that_arrive_leave_what_others_have_pending():
    assert arrivals() == [True] * 4


def test_rows_that_arrive_and_cost_others_what_they_have_pending_are_caught():
    assert arrivals(Forgetful(kit.WORDS)) == [False, False, True, True]


def test_a_drafter_that_starts_warm_with_a_slip_is_caught():
    good, bad = audit(), audit("length off by one")
    requests = requests_of(good, PROMPT, SETTINGS["greedy"])
    params, _ = audit_params(good, [PROMPT] * len(SLOTS), requests, SETTINGS["greedy"])
    seen = history(good, params, cold(good, params, requests), audit_view, 12)[0]
    assert not same(seen, history(bad, params, warm(bad, params, requests), audit_view, 12)[0])
