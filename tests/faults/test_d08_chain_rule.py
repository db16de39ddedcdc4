"""D08: the chain rule gives the target's law; the usual slips in it do not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.control.budget import Always, WidestLive
from spec_jax.control.throughput import Throughput
from spec_jax.tree import Draft, Law, chain
from spec_jax.verify.match import match
from spec_jax.verify.rejection import point_mass
from tests.faults.lawkit import PLAIN, TABLES, V, gate, gate_rule, guess
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
@pytest.mark.parametrize(
    ("fault", "calls"), [("replacement from p", 1), ("one coordinate", 1), ("lenience", 4), ("chosen by token", 1)]
)
def test_a_planted_fault_is_caught(fault, calls, name):
    assert not chain_with(fault, name, calls).ok


def test_a_small_number_in_the_denominator_is_caught():
    """On RND only: the other table hides it, as it shows others that RND hides."""
    assert not chain_with("epsilon", "RND", calls=4).ok


@pytest.mark.parametrize(
    "controller",
    [
        Always(),
        WidestLive(),
    ],
)
def test_a_budget_does_not_look_at_the_sampled_tokens_that_it_cuts(controller):
    """Or it would choose drafts by their tokens. Confidences behind the first cut node were made from cut tokens."""
    widths, rng = (1, 4, 8), np.random.default_rng(0)
    tree = jax.vmap(lambda anchor: chain(anchor, jnp.arange(7), jnp.int32(7)))(jnp.arange(2))
    active = jnp.array([True, True])
    law = Law(jnp.zeros((2, 8, V)))
    for _ in range(100):
        cost = jnp.asarray(np.sort(rng.uniform(1, 3, 3)), jnp.float32)
        confidence, other = rng.uniform(0.2, 1, (2, 2, 8))
        draft = Draft(tree, jnp.asarray(confidence, jnp.float32), law, "sampled")
        state = controller.init(2)
        chosen = int(controller.decide(state, draft, active, cost, widths))
        unseen = np.where(np.arange(8) > widths[chosen], other, confidence)
        draft = draft.replace(confidence=jnp.asarray(unseen, jnp.float32))
        assert controller.decide(state, draft, active, cost, widths) == chosen


def test_a_budget_that_weighs_confidences_refuses_sampled_drafts():
    tree = jax.vmap(lambda anchor: chain(anchor, jnp.arange(7), jnp.int32(7)))(jnp.arange(2))
    draft = Draft(tree, jnp.ones((2, 8)), Law(jnp.zeros((2, 8, V))), "sampled")
    state, active = Throughput().init(2), jnp.array([True, True])
    with pytest.raises(ValueError, match="controller: got Throughput with a 'sampled' draft"):
        Throughput().decide(state, draft, active, jnp.ones(3), (1, 4, 8))
