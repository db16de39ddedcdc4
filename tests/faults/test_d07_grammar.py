"""D07: a constraint masks every position by the text before it, and its state follows the accepted tokens."""

import numpy as np
import pytest

from spec_jax.sampling.settings import Sampling
from tests.faults.lawkit import MATCH, PLAIN, START, TABLES, V, engine, gate, gate_rule, guess, sample
from tests.faults.oracle import generate
from tests.faults.planted import SLOT_FAULTS, slot_rule

# (01)*2 over tokens 0, 1, 2; token 2 ends the text.
EOS = 2
GRAMMAR = np.full((3, V + 1), -1)
GRAMMAR[0, [0, 2]], GRAMMAR[1, 1], GRAMMAR[2, 2] = [1, 2], 0, 2
# What comes after tokens 0 .. 4 and at the start.
NEXT = {"legal": [1, 0, 2, 2, 2, 0], "illegal": [3, 4, 0, 1, 3, 4], "legal, then illegal": [0, 3, 1, 1, 2, 0]}


def one_sided(tokens):
    return np.where(np.arange(V) == np.array(tokens)[:, None], 4.0, 0.0)


@pytest.mark.parametrize("e", [engine(), MATCH], ids=["rejection", "match"])
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("draft", NEXT)
def test_law_over_the_language(e, name, draft):
    tables = TABLES[name][0], one_sided(NEXT[draft])
    assert gate(e, tables, guess(tables[1], PLAIN), n=4, eos=(EOS,), grammar=(GRAMMAR, 0)).ok


@pytest.mark.parametrize("draft", NEXT)
def test_greedy_text(draft):
    target = TABLES["RND"][0]
    texts, state = sample(
        MATCH, target, guess(one_sided(NEXT[draft]), PLAIN), Sampling(), 4, eos=(EOS,), grammar=(GRAMMAR, 0)
    )
    logits = lambda text: np.append(target[text[-1]], -np.inf)  # noqa: E731
    want = generate(logits, (START,), 4, Sampling(), eos=(EOS,), grammar=(GRAMMAR, 0))
    assert (texts[:, : len(want.tokens)] == want.tokens).all() and (texts[:, len(want.tokens) :] == -1).all()


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_state_is_that_of_the_committed_text(rounds):
    draft = guess(one_sided(NEXT["legal, then illegal"]), PLAIN)
    _, state = sample(engine(), TABLES["RND"][0], draft, PLAIN, 4, eos=(EOS,), grammar=(GRAMMAR, 0), max_rounds=rounds)
    want, r = np.zeros(len(state.rows.length), int), state.rows
    for i in range(1, 5):
        want = np.where(i < r.length, GRAMMAR[want, r.tokens[:, i]], want)
    assert (r.state == want + 1).all()
    assert len(set(r.length.tolist())) > 1


@pytest.mark.parametrize("fault", ["none", "frozen", "ignored"])
def test_a_mask_of_the_wrong_position_is_caught(fault):
    tables = TABLES["RND"][0], one_sided(NEXT["legal"])
    draft = guess(tables[1], PLAIN, tag=SLOT_FAULTS.index(fault))
    fit = gate_rule(slot_rule, tables, draft, grammar=(GRAMMAR, 0))
    assert fit.ok if fault == "none" else fit.outside > 100
