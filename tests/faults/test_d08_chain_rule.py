"""D08: the chain rule gives the target's law; the usual slips in it do not."""

import pytest

from spec_jax.verify.rejection import point_mass
from tests.faults.lawkit import MATCH, PLAIN, TABLES, engine, gate, gate_rule, guess
from tests.faults.planted import RULE_FAULTS, chain_rule

ENGINES = {"match": MATCH, "rejection": engine(), "point_mass": engine(point_mass, "point")}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("rule", ENGINES)
@pytest.mark.parametrize("k", [1, 2])
def test_law(name, rule, k):
    fit = gate(ENGINES[rule], TABLES[name], guess(TABLES[name][1], PLAIN, k=k), calls=4 if k == 2 else 1)
    assert fit.ok, fit


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
