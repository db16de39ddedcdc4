"""The marginal budget: its count is the rule's, rounded up to a compiled width."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_jax.control.budget import BudgetController, path_probability
from spec_jax.control.marginal import Marginal
from spec_jax.control.throughput import Throughput
from spec_jax.topology import stop
from spec_jax.tree import Draft, Tree

N = 8
WIDTHS = (1, 3, 5, 8)
M = Marginal()
DECIDE = jax.jit(lambda draft, active, cost: M.decide(M.init(2), draft, active, cost, WIDTHS))


def drafts(seed):
    """Two rows of nodes in descending order of chance: chains of some length."""
    rng = np.random.default_rng(seed)
    confidence = np.concatenate([np.ones((2, 1)), rng.uniform(0.05, 0.99, (2, N - 1))], axis=1)
    valid = np.arange(N) < rng.integers(1, N + 1, (2, 1))
    parent = jnp.broadcast_to(jnp.arange(-1, N - 1), (2, N))
    tree = Tree(jnp.zeros((2, N), jnp.int32), parent, jnp.asarray(valid))
    return Draft(tree, jnp.asarray(confidence, jnp.float32))


@given(st.integers(0, 2**16), st.lists(st.booleans(), min_size=2, max_size=2), st.floats(0.01, 0.4))
def test_the_width_that_holds_the_nodes_worth_their_cost(seed, active, slope):
    draft, cost = drafts(seed), 1 + slope * (np.array(WIDTHS) - 1)
    chance = np.asarray(path_probability(draft))[np.flatnonzero(active)].sum(0)
    rate = np.cumsum(chance) / (1 + slope * np.arange(N))
    chosen = int(DECIDE(draft, jnp.asarray(active), jnp.asarray(cost, jnp.float32)))
    if not any(active):
        assert chosen == 0
        return
    best = np.flatnonzero(rate >= rate.max() * (1 - 1e-4)) + 1
    assert chosen in {next(i for i, w in enumerate(WIDTHS) if w >= n) for n in best}


def test_it_agrees_with_throughput_where_the_widths_are_every_count():
    widths, cost = tuple(range(1, N + 1)), jnp.asarray(1 + 0.15 * np.arange(N), jnp.float32)
    yes = jnp.ones(2, bool)
    marginal, throughput = (
        [int(c.decide(c.init(2), drafts(seed), yes, cost, widths)) for seed in range(20)] for c in (M, Throughput())
    )
    assert marginal == throughput and len(set(marginal)) > 2


def test_another_rule():
    keen, shy = (Marginal(rule=stop.Likely(least)) for least in (0.0, 0.9999))
    yes, cost = jnp.ones(2, bool), jnp.ones(len(WIDTHS))
    assert int(keen.decide(keen.init(2), drafts(0), yes, cost, WIDTHS)) == len(WIDTHS) - 1
    wide, low = drafts(0), jnp.full((2, N), 0.01).at[:, 0].set(1.0)
    assert int(shy.decide(shy.init(2), wide.replace(confidence=low), yes, cost, WIDTHS)) == 0
    assert hash(keen) == hash(Marginal(rule=stop.Likely(0.0))) and isinstance(keen, BudgetController)


@pytest.mark.parametrize("proposal", ["sampled", "without_replacement"])
def test_drawn_drafts_are_refused(proposal):
    with pytest.raises(ValueError, match=f"controller: got Marginal with a '{proposal}' draft"):
        M.decide(M.init(2), drafts(0).replace(proposal=proposal), jnp.ones(2, bool), jnp.ones(4), WIDTHS)


def test_calibration_is_throughput_s():
    state = M.init(2)
    taught = state.replace(seen=state.seen + 1e6)
    sure = drafts(0).replace(confidence=jnp.full((2, N), 0.95).at[:, 0].set(1.0))
    cost, yes = jnp.asarray(1 + 0.1 * np.array(WIDTHS), jnp.float32), jnp.ones(2, bool)
    assert int(M.decide(state, sure, yes, cost, WIDTHS)) > int(M.decide(taught, sure, yes, cost, WIDTHS)) == 0
