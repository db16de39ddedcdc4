"""D08: the chain rule gives the target's law; the usual slips in it do not."""

import pytest

from spec_jax.verify.match import match
from spec_jax.verify.rejection import point_mass
from tests.faults.lawkit import PLAIN, TABLES, gate, gate_rule, guess
from tests.faults.planted import RULE_FAULTS, chain_rule


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("k", "calls"), [(1, 1), (2, 4)])
def test_law(name, k, calls):
    target, draft = TABLES[name]
    assert gate(target, guess(draft, PLAIN, k=k), calls=calls).ok


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("rule", [match, point_mass])
def test_law_of_rules_that_do_not_ask_how_a_draft_was_made(rule, name, k):
    target, draft = TABLES[name]
    assert gate_rule(rule, target, guess(draft, PLAIN, k=k)).ok


def chain_with(fault, name, calls):
    target, draft = TABLES[name]
    return gate_rule(chain_rule, target, guess(draft, PLAIN, tag=RULE_FAULTS.index(fault)), calls=calls)


@pytest.mark.parametrize("name", TABLES)
def test_the_rule_that_faults_are_planted_in_is_right_without(name):
    assert chain_with("none", name, calls=4).ok


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("fault", "calls"), [("replacement from p", 1), ("one coordinate", 1), ("lenience", 4)])
def test_a_planted_fault_is_caught(fault, calls, name):
    assert not chain_with(fault, name, calls).ok


def test_a_small_number_in_the_denominator_is_caught():
    """On RND only: the other table hides it, as it shows others that RND hides."""
    assert not chain_with("epsilon", "RND", calls=4).ok
