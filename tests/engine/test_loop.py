import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.engine import loop, rows
from spec_jax.engine.requests import request, stack
from spec_jax.engine.state import Finish
from spec_jax.sampling.settings import Sampling
from tests.faults import kit
from tests.faults.oracle import generate

BATCH = 3
TABLES = kit.row_tables(50, BATCH)
PROMPTS = [[1, 2, 3], [4], [5, 6]]
BUDGETS = [20, 4, 9]
WANT = [generate(kit.logits_of(TABLES[r]), PROMPTS[r], BUDGETS[r]) for r in range(BATCH)]
ENGINE, PARAMS = kit.follow(TABLES, [p + t.tokens for p, t in zip(PROMPTS, WANT, strict=True)], [1, 0, 3], 3, 3, BATCH)
init = kit.jit(functools.partial(rows.init, ENGINE))
decode = kit.jit(functools.partial(loop.decode, ENGINE))
decode_until = kit.jit(functools.partial(loop.decode, ENGINE, until_any_finishes=True))
MANY = jnp.int32(100)


def requests(budgets=BUDGETS, **options):
    return stack([request(ENGINE, p, b, **options) for p, b in zip(PROMPTS, budgets, strict=True)])


@pytest.fixture(scope="module")
def start():
    return init(PARAMS, requests())


def test_until_every_row_has_finished(start):
    done = decode(PARAMS, start, MANY)
    assert (done.rows.finish == Finish.BUDGET).all()
    assert all(kit.same_text(done, r, WANT[r]) and kit.holds_text(done, r) for r in range(BATCH))


def test_a_bound_on_rounds(start):
    state = start
    for n in (0, 1, 2, 3):
        state = decode(PARAMS, start, jnp.int32(n))
        assert (state.rows.counters.rounds <= n).all() and state.rows.counters.rounds.max() == n
    again = start
    for _ in range(3):
        again = decode(PARAMS, again, jnp.int32(1))
    jax.tree.map(np.testing.assert_array_equal, again, state)


def test_until_any_row_finishes(start):
    state = decode_until(PARAMS, start)
    assert (state.rows.finish != Finish.RUNNING).sum() == 1
    before = decode(PARAMS, start, state.rows.counters.rounds.max() - 1)
    assert (before.rows.finish == Finish.RUNNING).all()
    state = decode_until(PARAMS, state)
    assert (state.rows.finish != Finish.RUNNING).sum() == 2


def test_nothing_to_do(start):
    done = decode(PARAMS, start, MANY)
    jax.tree.map(np.testing.assert_array_equal, decode(PARAMS, done, MANY), done)


def test_inside_a_callers_jit():
    """Prompts are made and texts are used in the same program: a rollout and its mean log-prob."""

    @kit.jit
    def rollout(params, given, seed):
        key = jax.random.key_data(jax.random.split(jax.random.key(seed, impl="threefry2x32"), BATCH))
        state = loop.decode(ENGINE, params, rows.init(ENGINE, params, given.replace(key=key)))
        written = jnp.arange(kit.MAX_LEN) >= state.rows.prompt_length[:, None]
        written &= jnp.arange(kit.MAX_LEN) < state.rows.length[:, None]
        return state.rows.tokens, jnp.where(written, state.rows.log_probs, 0).sum() / written.sum(), key

    sampling = Sampling(temperature=1.0)
    tokens, mean, key = rollout(PARAMS, requests(sampling=sampling), 3)
    noise = kit.gumbels(key)
    want = [generate(kit.logits_of(TABLES[r]), PROMPTS[r], BUDGETS[r], sampling, noise[r]) for r in range(BATCH)]
    for r, text in enumerate(want):
        begin = len(PROMPTS[r])
        assert tokens[r, begin : begin + BUDGETS[r]].tolist() == text.tokens
    np.testing.assert_allclose(mean, np.concatenate([text.log_probs for text in want]).mean(), atol=1e-6)
    assert rollout._cache_size() == 1


def test_nothing_compiles_after_the_first_call():
    decode(PARAMS, init(PARAMS, requests()), MANY)
    compiled = init._cache_size(), decode._cache_size()
    variants = [
        {},
        {"budgets": [1, 1, 1]},
        {"sampling": Sampling(temperature=0.7, top_k=3, presence_penalty=1.0, logit_bias={1: 2.0})},
        {"eos": [3], "stops": [[1, 2]]},
        {"key": 7},
    ]
    for options in variants:
        for rounds in (1, 100):
            decode(PARAMS, init(PARAMS, requests(**options)), jnp.int32(rounds))
    assert (init._cache_size(), decode._cache_size()) == compiled == (1, 1)


def test_no_transfer_to_or_from_the_host(start):
    params, state, rounds = jax.block_until_ready((PARAMS, start, MANY))
    decode(params, state, rounds)
    with jax.transfer_guard("disallow"):
        done = decode(params, state, rounds)
        with pytest.raises(Exception, match="[Dd]isallowed"):
            decode(params, state, 100)
    assert all(kit.same_text(done, r, WANT[r]) for r in range(BATCH))
