"""D08: the chain rule gives the target's law; the usual slips in it do not."""

import pytest

from spec_jax.verify.rejection import point_mass
from tests.faults.lawkit import MATCH, PLAIN, TABLES, engine, gate, gate_rule, guess
from tests.faults.planted import RULE_FAULTS, chain_rule

ENGINES = {"match": MATCH, "rejection": engine()}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("rule", ENGINES)
@pytest.mark.parametrize("k", [1, 2])
def test_law(name, rule, k):
    calls = 4 if (rule, k) == ("rejection", 2) else 1
    assert gate(ENGINES[rule], TABLES[name], guess(TABLES[name][1], PLAIN, k=k), calls=calls).ok


@pytest.mark.parametrize("name", TABLES)
def test_law_of_the_point_mass_rule(name):
    """Whatever the draft: here it is drawn, and the rule does not look at how."""
    assert gate_rule(point_mass, TABLES[name], guess(TABLES[name][1], PLAIN)).ok


def rule_with(fault, name, calls=4):
    draft = guess(TABLES[name][1], PLAIN, tag=RULE_FAULTS.index(fault))
    return gate_rule(chain_rule, TABLES[name], draft, calls=calls)


@pytest.mark.parametrize("name", TABLES)
def test_the_rule_that_faults_are_planted_in_is_right_without(name):
    assert rule_with("none", name).ok


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("fault", "calls"), [("replacement from p", 1), ("one coordinate", 1), ("lenience", 4)])
def test_a_planted_fault_is_caught(fault, calls, name):
    assert not rule_with(fault, name, calls).ok


def test_a_small_number_in_the_denominator_is_caught():
    """On RND only: the other table hides it, as it shows others that RND hides."""
    assert not rule_with("epsilon", "RND").ok
