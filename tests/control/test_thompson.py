"""Thompson sampling: rates have the Beta law of what was seen, widths are the best for them, keys are used once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from spec_jax.control.budget import BudgetController
from spec_jax.control.thompson import Posterior, Thompson
from spec_jax.control.throughput import Throughput
from tests.control.test_throughput import COST, WIDTHS, N, chain_of, drafts, judge, rates

T = Thompson(bins=4, prior=3.0)
MIDDLES = jnp.asarray(T.middles())
DECIDE = jax.jit(lambda state, draft, active: T.decide(state, draft, active, COST, WIDTHS))
OBSERVE = jax.jit(T.observe)


def known(seed):
    """A state that has seen something in every bin, refused nodes too: float32 has few rates near 1."""
    rng = np.random.default_rng(seed)
    seen = rng.uniform(5, 25, T.bins)
    accepted = seen * rng.uniform(0.1, 0.8, T.bins)
    return T.init(1).replace(seen=jnp.asarray(seen, jnp.float32), accepted=jnp.asarray(accepted, jnp.float32))


def fits(policy, state, draws=4000):
    """Whether the drawn rates of every bin have the Beta law of the counts (Kolmogorov-Smirnov)."""
    keys = jax.random.bits(jax.random.key(0), (draws, 2), jnp.uint32)
    drawn = np.asarray(jax.vmap(lambda key: policy.calibrated(state.replace(key=key), MIDDLES))(keys))
    seen, accepted = np.asarray(state.seen, float), np.asarray(state.accepted, float)
    odds = -2.5 + (np.arange(T.bins) + 0.5) * 7 / T.bins
    own = T.prior / (1 + np.exp(-odds))
    laws = [stats.beta(own[i] + accepted[i], T.prior - own[i] + seen[i] - accepted[i]) for i in range(T.bins)]
    return min(stats.kstest(drawn[:, i], law.cdf).pvalue for i, law in enumerate(laws)) > 1e-4


class Forgetful(Thompson):
    """A planted fault: refused nodes are not counted."""

    def beta(self, state):
        return super().beta(state)[0], self.prior * (1 - MIDDLES)


@pytest.mark.parametrize("seed", range(3))
def test_rates_have_the_law_of_what_was_seen_and_a_fault_is_caught(seed):
    assert fits(T, known(seed))
    assert not fits(Forgetful(bins=4, prior=3.0), known(seed))
    assert not fits(Throughput(bins=4, prior=3.0), known(seed)), "means are no draws"


def test_every_middle_is_in_its_own_bin():
    assert np.asarray(T._bin(MIDDLES)).tolist() == list(range(T.bins))


@given(st.integers(0, 2**16), st.lists(st.booleans(), min_size=2, max_size=2))
def test_the_width_is_the_best_one_for_the_drawn_rates(seed, active):
    state, draft = known(seed), drafts(seed)
    rate = rates(draft, np.asarray(T.calibrated(state, draft.confidence)), active)
    assert rate[int(DECIDE(state, draft, jnp.asarray(active)))] >= rate.max() * (1 - 1e-4)


def rounds(rate, count=150, seed=0):
    """Widths of the rounds on a chain whose tokens are accepted at a rate, and the states."""
    state, rng = Thompson(bins=4, prior=3.0, seed=seed).init(1), np.random.default_rng(1)
    draft, widths, states = chain_of([0] + [1] * (N - 1), 0.6), [], []
    for _ in range(count):
        width = WIDTHS[int(DECIDE(state, draft, jnp.array([True])))]
        says = np.where(rng.random(N) < rate, 1, 2).tolist()
        state = OBSERVE(state, draft, jnp.int32(width), judge(draft, [says], width), jnp.array([True]))
        widths.append(width)
        states.append(state)
    return np.array(widths), states


def test_it_tries_several_widths_and_comes_to_the_best():
    likely, unlikely = rounds(0.95)[0], rounds(0.02)[0]
    assert (likely[-50:] == N).mean() > 0.9 and (unlikely[-50:] == 1).mean() > 0.9
    assert len(set(unlikely[:20].tolist())) > 1


def test_keys_are_the_states_and_used_once():
    widths, states = rounds(0.4, 30)
    again, other = rounds(0.4, 30)[0], rounds(0.4, 30, seed=1)[0]
    assert (widths == again).all() and (widths != other).any()
    assert len({tuple(np.asarray(s.key).tolist()) for s in states}) == 30
    before, after = (T.calibrated(Posterior(jnp.ones(4), jnp.ones(4), s.key), MIDDLES) for s in states[:2])
    assert (np.asarray(before) != np.asarray(after)).all()


def test_what_does_not_fit_is_refused():
    assert isinstance(T, BudgetController) and T.uses_cost
    with pytest.raises(ValueError, match="controller: got Thompson with a 'sampled' draft"):
        T.decide(T.init(2), drafts(0).replace(proposal="sampled"), jnp.ones(2, bool), COST, WIDTHS)
    with pytest.raises(ValueError, match="bins: got 0"):
        Thompson(bins=0)
