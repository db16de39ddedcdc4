"""D06: penalties see the prompt, the output, and the drafted tokens before the position."""

import numpy as np
import pytest

from spec_jax.sampling.settings import Sampling
from tests.faults.lawkit import MATCH, PLAIN, START, TABLES, engine, gate, gate_rule, guess, sample
from tests.faults.oracle import generate
from tests.faults.planted import SLOT_FAULTS, slot_rule

PENALTIES = [{"presence_penalty": 2.0}, {"frequency_penalty": 1.0}, {"repetition_penalty": 1.3}]


@pytest.mark.parametrize("e", [engine(), MATCH], ids=["rejection", "match"])
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("penalty", PENALTIES, ids=lambda p: next(iter(p)))
def test_law(e, name, penalty):
    assert gate(e, TABLES[name], guess(TABLES[name][1], PLAIN), Sampling(temperature=1.0, **penalty)).ok


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("penalty", PENALTIES, ids=lambda p: next(iter(p)))
def test_greedy_text(name, k, penalty):
    target, draft = TABLES[name]
    sampling, prompt = Sampling(**penalty), (START, 1, 3)
    texts, _ = sample(MATCH, target, guess(draft, PLAIN, k=k), sampling, 5, prompt=prompt)
    want = generate(lambda text: np.append(target[text[-1]], -np.inf), prompt, 5, sampling).tokens
    assert (texts == want).all()


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("fault", ["none", "ignored", "frozen", "bonus only"])
def test_a_wrong_history_is_caught(name, fault):
    sampling, (_, draft) = Sampling(temperature=1.0, presence_penalty=2.0), TABLES[name]
    fit = gate_rule(slot_rule, TABLES[name], guess(draft, PLAIN, tag=SLOT_FAULTS.index(fault)), sampling)
    assert fit.ok == (fault == "none")
