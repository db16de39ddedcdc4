import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.engine import rows
from spec_jax.engine.requests import request, stack
from spec_jax.engine.state import Finish
from spec_jax.models.toy import POISON
from spec_jax.sampling.settings import Sampling
from tests.faults import kit
from tests.faults.drafters import Follow
from tests.faults.oracle import generate

BATCH, PASSES = 4, []


@dataclasses.dataclass(frozen=True)
class CountingTarget(kit.RowTables):
    """Counts the prefill passes that are run."""

    def prefill(self, params, state, tokens, count):
        jax.debug.callback(lambda: PASSES.append(1))
        return super().prefill(params, state, tokens, count)


ENGINE = dataclasses.replace(kit.engine(Follow(3, kit.WORDS), log_probs=False), target=CountingTarget())
TABLES = jnp.repeat(kit.row_tables(40, 1), BATCH, axis=0)
PROMPT = [int(t) for t in np.random.default_rng(0).integers(0, kit.WORDS, 20)]
PARAMS = kit.engine_params(ENGINE, TABLES, kit.plan([PROMPT], [0, 2, 3], 3, BATCH))
prefill = kit.jit(functools.partial(rows.init, ENGINE))
place = kit.jit(functools.partial(rows.place, ENGINE))
insert = kit.jit(functools.partial(rows.insert, ENGINE))
release = kit.jit(functools.partial(rows.release, ENGINE))
empty = kit.jit(functools.partial(rows.empty, ENGINE, batch=BATCH))
decode_rounds = kit.jit(functools.partial(kit.loop.decode, ENGINE))


def decode(params, state, rounds=kit.ALL):
    return decode_rounds(params, state, jnp.int32(rounds))


def want(prompt, budget, key=0, sampling=None):
    return generate(kit.logits_of(TABLES[0]), prompt, budget, sampling, kit.gumbels(kit.key_of(key)[None])[0])


def count_passes(call):
    jax.effects_barrier()
    PASSES.clear()
    result = jax.block_until_ready(call())
    jax.effects_barrier()
    return result, len(PASSES)


@pytest.mark.parametrize(("length", "passes"), [(1, 0), (2, 1), (9, 1), (10, 2), (20, 3)])
def test_prefill_leaves_the_anchor(length, passes):
    """Chunks of 8 tokens; the last token is scored in the first round."""
    state, n = count_passes(lambda: prefill(PARAMS, request(ENGINE, PROMPT[:length], 5)))
    assert n == passes
    assert kit.holds_text(state, 0) and state.rows.length[0] == length
    assert state.rows.finish[0] == Finish.RUNNING


def test_rows_of_different_lengths_are_prefilled_together():
    state = prefill(PARAMS, stack([request(ENGINE, PROMPT[:n], 5) for n in (1, 20, 8, 9)]))
    assert all(kit.holds_text(state, row) for row in range(BATCH))


def test_empty_slots():
    state = empty(PARAMS)
    assert (state.rows.finish == Finish.EMPTY).all() and not state.rows.running.any()
    same = decode(PARAMS, state)
    jax.tree.map(np.testing.assert_array_equal, same, state)


def test_a_prompt_sampled_n_times_is_prefilled_once():
    sampling = Sampling(temperature=1.0)
    requests = [request(ENGINE, PROMPT, 6 + i, i, sampling) for i in range(3)]
    one, passes = count_passes(lambda: prefill(PARAMS, requests[0]))
    state, more = count_passes(lambda: place(empty(PARAMS), jnp.array([2, 0, 3]), one, stack(requests)))
    assert (passes, more) == (3, 0)
    done, more = count_passes(lambda: decode(PARAMS, state))
    assert more == 0
    for i, slot in enumerate([2, 0, 3]):
        assert kit.same_text(done, slot, want(PROMPT, 6 + i, i, sampling)) and kit.holds_text(done, slot)
    assert done.rows.finish[1] == Finish.EMPTY and done.rows.length[1] == 0
    assert len({tuple(kit.output(done, slot)[:6]) for slot in (2, 0, 3)}) == 3


def test_rows_come_and_go():
    """A slot is used again while its neighbours run on; every text is that of a run of its own."""
    two = stack([request(ENGINE, PROMPT[:3], 30), request(ENGINE, [1], 4)])
    state = insert(empty(PARAMS), jnp.array([0, 1]), prefill(PARAMS, two))
    state = decode(PARAMS, state, 4)
    assert state.rows.finish.tolist() == [Finish.RUNNING, Finish.BUDGET, Finish.EMPTY, Finish.EMPTY]
    assert kit.same_text(state, 1, want([1], 4))
    state = release(state, jnp.array([1]))
    assert (state.target.slots[1] == POISON).all() and state.target.length[1] == 0
    assert state.rows.length[1] == 0 and state.rows.finish[1] == Finish.EMPTY and state.drafter.round[1] == 0
    state = insert(state, jnp.array([1]), prefill(PARAMS, request(ENGINE, PROMPT[:9], 11)))
    assert state.rows.counters.emitted[1] == 0
    state = decode(PARAMS, state)
    for slot, (prompt, budget) in enumerate([(PROMPT[:3], 30), (PROMPT[:9], 11)]):
        assert kit.same_text(state, slot, want(prompt, budget)) and kit.holds_text(state, slot)


@pytest.mark.parametrize("slot", [BATCH, -1, 99])
def test_a_slot_out_of_range_is_left_out(slot):
    one = prefill(PARAMS, request(ENGINE, PROMPT, 5))
    state = insert(empty(PARAMS), jnp.array([3]), one)
    at = jnp.array([slot])
    for other in (
        insert(state, at, prefill(PARAMS, request(ENGINE, [1, 2], 3))),
        place(state, at, one, request(ENGINE, PROMPT, 7)),
        rows.close(state, at),
        release(state, at),
    ):
        jax.tree.map(np.testing.assert_array_equal, other, state)


def test_close_ends_running_rows_only():
    two = stack([request(ENGINE, [1, 2], 20), request(ENGINE, [1], 0)])
    state = decode(PARAMS, insert(empty(PARAMS), jnp.array([0, 1]), prefill(PARAMS, two)), 2)
    closed = rows.close(state, jnp.array([0, 1, 2]))
    assert closed.rows.finish.tolist() == [Finish.CLOSED, Finish.BUDGET, Finish.EMPTY, Finish.EMPTY]
    after = decode(PARAMS, closed)
    jax.tree.map(np.testing.assert_array_equal, after, closed)
    text = kit.output(after, 0)
    assert len(text) > 1 and text == want([1, 2], 20).tokens[: len(text)]


def test_requests_of_another_buffer_are_refused():
    other = dataclasses.replace(ENGINE, max_len=kit.MAX_LEN - 1)
    with pytest.raises(ValueError, match=f"tokens: got a buffer of {kit.MAX_LEN - 1} tokens a row"):
        rows.init(ENGINE, PARAMS, request(other, [1]))


def test_a_constraint_state_outside_the_table_allows_nothing():
    with pytest.raises(ValueError, match="constraint_start: got -1, takes a state of the engine's constraint, from 0"):
        request(ENGINE, [1], 5, constraint_start=-1)
    states = PARAMS.constraint.table.shape[0]
    starts = (states, 0, 2**30, 0)
    state = prefill(PARAMS, stack([request(ENGINE, [1, 2], 5, constraint_start=start) for start in starts]))
    state = decode(PARAMS, state)
    for row, start in enumerate(starts):
        outside = start >= states
        assert (kit.finish(state, row) == "INVALID") == outside and (kit.output(state, row) == []) == outside
