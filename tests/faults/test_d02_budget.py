"""D02: the budget is met exactly, for every small value and every acceptance."""

import numpy as np
import pytest

from spec_jax.engine import round as rounds
from spec_jax.engine import stops
from spec_jax.engine.requests import request
from tests.faults import kit
from tests.faults.oracle import generate

TABLES = kit.row_tables(2)
PROMPTS = [[r % kit.WORDS] * (1 + r % 3) for r in range(kit.ROWS)]
LONG = [generate(kit.logits_of(TABLES[r]), PROMPTS[r], 30).tokens for r in range(kit.ROWS)]
BUDGETS = [r % 12 for r in range(kit.ROWS)]
FULL = [p + t for p, t in zip(PROMPTS, LONG, strict=True)]


def run(counts=None, k=4, how=kit.run):
    if counts is None:
        e = kit.engine()
        params = kit.engine_params(e, TABLES)
    else:
        e, params = kit.follow(TABLES, FULL, counts=counts, length=k)
    return how(e, params, kit.batch([request(e, p, b) for p, b in zip(PROMPTS, BUDGETS, strict=True)]))


@pytest.mark.parametrize("counts", [None, 4, [0, 4, 2]], ids=["no drafter", "perfect", "scripted"])
def test_budget(counts):
    state = run(counts)
    for r, budget in enumerate(BUDGETS):
        assert kit.output(state, r) == LONG[r][:budget]
        assert kit.same_text(state, r, generate(kit.logits_of(TABLES[r]), PROMPTS[r], budget))
        assert kit.holds_text(state, r)
    assert state.target.slots.shape[1] == kit.engine().slots


@pytest.mark.parametrize("counts", [None, 4], ids=["no drafter", "perfect"])
def test_no_round_that_is_not_needed(counts):
    state = run(counts)
    block = 1 if counts is None else 5
    assert state.rows.counters.rounds.tolist() == [-(-b // block) for b in BUDGETS]
    assert (state.rows.counters.drafted <= np.maximum(np.array(BUDGETS) - state.rows.counters.rounds, 0)).all()


def test_a_batch_without_budget_makes_no_target_call():
    e, params = kit.follow(TABLES, FULL, counts=4, length=4)
    state = kit.run(e, params, kit.batch([request(e, p, 0) for p in PROMPTS]))
    assert not state.rows.counters.rounds.any() and not state.drafter.round.any()


def test_a_token_too_many_is_caught(monkeypatch):
    more = lambda rows, verdict, max_len: stops.trim(rows.replace(limit=rows.limit + 1), verdict, max_len)  # noqa: E731
    monkeypatch.setattr(rounds, "trim", more)
    state = run(4, how=kit.run_anew)
    assert not any(kit.output(state, r) == LONG[r][:budget] for r, budget in enumerate(BUDGETS) if budget)
