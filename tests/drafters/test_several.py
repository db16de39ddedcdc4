"""What drafters made of others pass on to them: what is remembered of prompts, and which of them taps what."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.control.bandit import Ucb
from spec_jax.drafters.cascade import Cascade
from spec_jax.drafters.chosen import Chosen
from spec_jax.drafters.combined import Combined
from spec_jax.drafters.drafter import Committed, memory_of
from spec_jax.drafters.ngram import NGram
from spec_jax.drafters.siblings import Siblings, SiblingsState
from spec_jax.models.target import Output
from spec_jax.rollout.engine import RolloutEngine
from spec_jax.rollout.gated import Gate, Gated
from spec_jax.tree import Tree
from tests.rollout import kit

LOOKUP, SIBLINGS = NGram(5), Siblings(nodes=6, longest=6, memory=24)
MADE = {
    "combined": Combined(LOOKUP, SIBLINGS, 6),
    "combined, the other way round": Combined(SIBLINGS, LOOKUP, 6),
    "chosen": Chosen((LOOKUP, SIBLINGS, Siblings(nodes=6, longest=6, memory=0)), Ucb()),
    "cascade": Cascade(kit.TARGET, SIBLINGS, 5),
}


def remembered(state):
    """What the siblings within a state remember."""
    inside = lambda x: isinstance(x, SiblingsState)  # noqa: E731
    return [np.asarray(x.memory) for x in jax.tree.leaves(state, is_leaf=inside) if inside(x)]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_what_is_remembered_reaches_the_drafter_that_asked_for_it(name, gated):
    d = Gated(MADE[name]) if gated else MADE[name]
    params = kit.policy() if name == "cascade" else None
    state = d.init(Gate(jnp.int32(2), params) if gated else params, 2, kit.MAX_LEN)
    memory = jnp.arange(48).reshape(2, 24)
    after = d.recall(state, memory)
    got = [m for m in remembered(after) if m.size]
    assert memory_of(d) == 24 and len(got) == 1 and (remembered(state)[0] == -1).all()
    np.testing.assert_array_equal(got[0], memory)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


@pytest.mark.parametrize("name", MADE)
def test_a_rollout_engine_remembers_for_drafters_within_others(name):
    rollouts = RolloutEngine(kit.engine(MADE[name]), kit.policy(), sizes=(2,), prompts=3)
    assert rollouts.carried.memory is not None and rollouts.carried.memory.tokens.shape == (3, 24)


def test_it_remembers_nothing_for_those_that_ask_for_nothing():
    for d in (LOOKUP, Siblings(memory=0), Gated(LOOKUP), Combined(LOOKUP, LOOKUP, 6), Cascade(kit.TARGET, LOOKUP, 5)):
        assert memory_of(d) == 0
        assert RolloutEngine(kit.engine(d), kit.policy(), sizes=(2,)).carried.memory is None


def test_drafters_that_remember_different_amounts_are_refused():
    d = Combined(SIBLINGS, Siblings(nodes=6, longest=6, memory=32), 6)
    with pytest.raises(ValueError, match=r"memory: got drafters that remember \[24, 32\] tokens a row, takes equal"):
        RolloutEngine(kit.engine(d), kit.policy(), sizes=(2,))


@pytest.mark.parametrize("name", ["combined", "chosen"])
def test_a_verdict_is_told_through_a_gate(name):
    d, whole = Gated(MADE[name]), lambda *x: jnp.asarray([x], jnp.int32)
    gate = Gate(jnp.int32(2), None)
    tree = Tree(whole(*range(6)), whole(-1, *range(5)), jnp.ones((1, 6), bool))
    taps = d.tap(Output(jnp.zeros((1, 6, kit.WORDS))))
    told = Committed(whole(0, 1, 2), whole(4)[0], whole(3)[0], whole(9)[0], whole(0, 1, 2), taps, tree)
    assert d.observe(gate, d.init(gate, 1, kit.MAX_LEN), told).known.tolist() == [7]
