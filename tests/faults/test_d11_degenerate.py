"""D11: zeros, infinities and equal laws: nothing becomes NaN, and an empty residual falls back to the target's law."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.sampling.settings import Sampling
from spec_jax.verify.match import match
from spec_jax.verify.rejection import point_mass
from tests.faults.drafters import Guess
from tests.faults.lawkit import PLAIN, V, gate, gate_rule, law_of, sample, table
from tests.faults.laws import fit
from tests.faults.planted import RULE_FAULTS, chain_rule

HALF = [0.5, 0.5, 0, 0, 0]
SPREAD = [0.1, 0.2, 0.3, 0.2, 0.2]
# Target's law, the law that is drawn from, and the one that the draft states.
LAWS = {
    "equal": (SPREAD, SPREAD, SPREAD),
    "one-hot target": ([0, 0, 1, 0, 0], SPREAD, SPREAD),
    "one-hot both": ([0, 0, 1, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 0, 0]),
    "disjoint": (HALF, [0, 0, 0.2, 0.3, 0.5], [0, 0, 0.2, 0.3, 0.5]),
    "target has holes": ([0.3, 0, 0.7, 0, 0], SPREAD, SPREAD),
    "empty residual": (SPREAD, SPREAD, [0.2, 0.4, 0.6, 0.4, 0.4]),
}


def logits(p):
    with np.errstate(divide="ignore"):
        return np.log(np.tile(p, (V + 1, 1)))


def draft(drawn, said, tag="none"):
    rows = [table(logits(p)) for p in (drawn, said)]
    return Guess(*rows, jnp.int32(2), jnp.int32(0), jnp.int32(RULE_FAULTS.index(tag)))


@pytest.mark.parametrize("case", LAWS)
def test_law(case):
    target, drawn, said = LAWS[case]
    assert gate(logits(target), draft(drawn, said)).ok


@pytest.mark.parametrize("rule", [match, point_mass])
@pytest.mark.parametrize("case", LAWS)
def test_law_of_rules_that_do_not_ask_how_a_draft_was_made(case, rule):
    target, drawn, said = LAWS[case]
    assert gate_rule(rule, logits(target), draft(drawn, said)).ok


def test_equal_laws_are_always_kept():
    _, state = sample(logits(SPREAD), draft(SPREAD, SPREAD), PLAIN, 3)
    assert (state.rows.counters.rounds == 1).all()


@pytest.mark.parametrize("token", [0, 3])
def test_a_token_that_the_stated_law_lacks(token):
    """q(x) = 0: it can't have been drawn, so it is passed over, and the text keeps the law of p."""
    texts, state = sample(logits(HALF), draft(np.eye(V)[token], [0, 0, 0.5, 0, 0.5]), PLAIN, 2)
    assert (state.rows.counters.accepted == 0).all()
    assert fit(texts, law_of(logits(HALF), PLAIN, 2)).ok


def test_greedy_takes_the_only_token():
    texts, _ = sample(logits([0, 0, 1, 0, 0]), draft(SPREAD, SPREAD), Sampling(), 3)
    assert (texts == 2).all()


def test_a_uniform_fallback_is_caught():
    target, drawn, said = LAWS["empty residual"]
    assert gate_rule(chain_rule, logits(target), draft(drawn, said)).ok
    assert not gate_rule(chain_rule, logits(target), draft(drawn, said, "uniform")).ok


def test_a_rule_that_keeps_what_both_laws_lack_is_caught():
    drafts = {fault: draft(np.eye(V)[3], [0, 0, 0.5, 0, 0.5], fault) for fault in ("none", "at most")}
    outside = {f: gate_rule(chain_rule, logits(HALF), d).outside for f, d in drafts.items()}
    assert outside["none"] == 0 and outside["at most"] > 100
