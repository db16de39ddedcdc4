"""D07: a constraint masks every position by the text before it, and its state follows the accepted tokens."""

import numpy as np
import pytest

from spec_jax.sampling.settings import Sampling
from spec_jax.verify.match import match
from tests.faults.lawkit import PLAIN, START, TABLES, V, gate, gate_rule, guess, sample
from tests.faults.oracle import generate
from tests.faults.planted import SLOT_FAULTS, slot_rule

# (01)*2 over tokens 0, 1, 2; token 2 ends the text.
EOS = 2
TRANSITIONS = np.full((3, V + 1), -1)
TRANSITIONS[0, [0, 2]], TRANSITIONS[1, 1], TRANSITIONS[2, 2] = [1, 2], 0, 2
GRAMMAR = (TRANSITIONS, 0)
# What comes after tokens 0 .. 4 and at the start.
NEXT = {"legal": [1, 0, 2, 2, 2, 0], "illegal": [3, 4, 0, 1, 3, 4], "legal, then illegal": [0, 3, 1, 1, 2, 0]}
TARGET = TABLES["RND"][0]


def one_sided(name, tag="none"):
    logits = np.where(np.arange(V) == np.array(NEXT[name])[:, None], 4.0, 0.0)
    return guess(logits, PLAIN, tag=SLOT_FAULTS.index(tag))


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("draft", NEXT)
def test_law_over_the_language(name, draft):
    assert gate(TABLES[name][0], one_sided(draft), n=4, eos=(EOS,), grammar=GRAMMAR).ok


@pytest.mark.parametrize("draft", NEXT)
def test_law_of_matched_text(draft):
    assert gate_rule(match, TARGET, one_sided(draft), grammar=GRAMMAR).ok


@pytest.mark.parametrize("draft", NEXT)
def test_greedy_text(draft):
    texts, _ = sample(TARGET, one_sided(draft), Sampling(), 4, eos=(EOS,), grammar=GRAMMAR)
    logits = lambda text: np.append(TARGET[text[-1]], -np.inf)  # noqa: E731
    want = generate(logits, (START,), 4, Sampling(), eos=(EOS,), grammar=GRAMMAR).tokens
    assert (texts == np.pad(want, (0, 4 - len(want)), constant_values=-1)).all()


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_state_is_that_of_the_committed_text(rounds):
    draft = one_sided("legal, then illegal")
    _, state = sample(TARGET, draft, PLAIN, 4, eos=(EOS,), grammar=GRAMMAR, max_rounds=rounds)
    want, r = np.zeros(len(state.rows.length), int), state.rows
    for i in range(1, 5):
        want = np.where(i < r.length, TRANSITIONS[want, r.tokens[:, i]], want)
    assert (r.state == want + 1).all()
    assert len(set(r.length.tolist())) > 1


@pytest.mark.parametrize("fault", ["none", "frozen", "ignored"])
def test_a_mask_of_the_wrong_position_is_caught(fault):
    fit = gate_rule(slot_rule, TARGET, one_sided("legal", fault), grammar=GRAMMAR)
    assert fit.ok if fault == "none" else fit.outside > 100
