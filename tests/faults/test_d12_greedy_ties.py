"""D12: greedy text equals plain decoding token for token, with many exact ties; the lowest id wins everywhere."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.engine.requests import request
from tests.faults import kit
from tests.faults.oracle import generate
from tests.faults.planted import lenient_match

BUDGET = 64
PROMPT = [1, 2]


def tied_tables(seed):
    """Integer logits 0, 1, 2; the last ten rows repeat the first ten."""
    shape = (kit.ROWS, kit.WORDS, kit.WORDS, kit.WORDS)
    tables = np.random.default_rng(seed).integers(0, 3, shape).astype(np.float32)
    tables[-10:] = tables[:10]
    return tables


TIED = {seed: tied_tables(seed) for seed in (0, 1)}
WANT = {s: [generate(kit.logits_of(t), PROMPT, BUDGET) for t in tables] for s, tables in TIED.items()}


def decode(e, params):
    return kit.run(e, params, kit.batch([request(e, PROMPT, BUDGET)]))


def check(state, seed):
    assert all(kit.same_text(state, r, WANT[seed][r]) and kit.holds_text(state, r) for r in range(kit.ROWS))
    assert (state.rows.tokens[-10:] == state.rows.tokens[:10]).all()


@pytest.mark.parametrize("seed", TIED)
def test_plain(seed):
    e = kit.engine()
    check(decode(e, kit.engine_params(e, jnp.asarray(TIED[seed]))), seed)


@pytest.mark.parametrize("seed", TIED)
@pytest.mark.parametrize("k", range(7))
def test_chain(seed, k):
    texts = [PROMPT + text.tokens for text in WANT[seed]]
    counts = np.random.default_rng(k).integers(0, k + 1, (kit.ROWS, BUDGET))
    check(decode(*kit.follow(jnp.asarray(TIED[seed]), texts, counts, k)), seed)


@pytest.mark.parametrize("seed", TIED)
def test_tree(seed):
    state = decode(*kit.tree(TIED[seed]))
    check(state, seed)
    assert state.rows.counters.accepted.sum() > kit.ROWS * BUDGET / 10


def test_a_rule_that_takes_the_tied_draft_is_caught():
    state = decode(*kit.tree(TIED[0], lenient_match, log_probs=False))
    assert sum(kit.same_text(state, r, WANT[0][r]) for r in range(kit.ROWS)) < kit.ROWS / 2
