"""D06: penalties see the prompt, the output, and the drafted tokens before the position."""

import pytest

from spec_jax.engine.requests import request
from spec_jax.sampling.settings import Sampling
from spec_jax.verify.match import match
from tests.faults import kit
from tests.faults.lawkit import PLAIN, TABLES, gate, gate_rule, guess
from tests.faults.oracle import generate
from tests.faults.planted import SLOT_FAULTS, slot_rule

PENALTIES = [{"presence_penalty": 2.0}, {"frequency_penalty": 1.0}, {"repetition_penalty": 1.3}]


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("penalty", PENALTIES, ids=lambda p: next(iter(p)))
def test_law(name, penalty):
    target, draft = TABLES[name]
    assert gate(target, guess(draft, PLAIN), Sampling(temperature=1.0, **penalty)).ok


@pytest.mark.parametrize("penalty", PENALTIES, ids=lambda p: next(iter(p)))
def test_law_of_matched_text(penalty):
    target, draft = TABLES["RND"]
    assert gate_rule(match, target, guess(draft, PLAIN), Sampling(temperature=1.0, **penalty)).ok


@pytest.mark.parametrize("k", [2, 3])
def test_greedy_text(k):
    tables, prompt = kit.row_tables(6), [1, 3, 3]
    settings = [Sampling(**PENALTIES[r % 3]) for r in range(kit.ROWS)]
    want = [generate(kit.logits_of(tables[r]), prompt, 20, settings[r]) for r in range(kit.ROWS)]
    plain = [generate(kit.logits_of(tables[r]), prompt, 20) for r in range(kit.ROWS)]
    e, params = kit.follow(tables, [prompt + text.tokens for text in want], [k, 0, 1], k)
    state = kit.run(e, params, kit.batch([request(e, prompt, 20, sampling=s) for s in settings]))
    assert all(kit.same_text(state, r, want[r]) for r in range(kit.ROWS))
    assert sum(a.tokens != b.tokens for a, b in zip(want, plain, strict=True)) > kit.ROWS / 2


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("fault", ["none", "ignored", "frozen", "bonus only"])
def test_a_wrong_history_is_caught(name, fault):
    sampling, (target, draft) = Sampling(temperature=1.0, presence_penalty=2.0), TABLES[name]
    fit = gate_rule(slot_rule, target, guess(draft, PLAIN, tag=SLOT_FAULTS.index(fault)), sampling)
    assert fit.ok == (fault == "none")
