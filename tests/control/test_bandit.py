"""Bandits against plain numpy, and what they are for: the better arm is played more and more."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.control.bandit import Exp3, Hedge, Ucb

K, ROUNDS = 3, 60
RATES = np.array([0.2, 0.7, 0.4])


@functools.cache
def program(policy):
    def step(state, reward):
        arm, state = policy.choose(state)
        return policy.observe(state, arm, reward), arm

    return jax.jit(step)


def played(policy, rewards):
    """(arms, states after each round) for rewards [rounds, k]."""
    state, arms, states = policy.init(rewards.shape[1]), [], []
    for reward in rewards:
        state, arm = program(policy)(state, jnp.asarray(reward, jnp.float32))
        arms.append(int(arm))
        states.append(state)
    return np.array(arms), states


def rewards(seed, rounds=ROUNDS):
    rng = np.random.default_rng(seed)
    return rng.binomial(5, RATES, (rounds, K)) / 5


@pytest.mark.parametrize("width", (1.0, 0.3))
def test_ucb_plays_the_arm_with_the_greatest_bound(width):
    given = rewards(0)
    arms, states = played(Ucb(width), given)
    for t, arm in enumerate(arms):
        seen = [given[:t][arms[:t] == k, k] for k in range(K)]
        bound = [s.mean() + width * np.sqrt(2 * np.log(t) / len(s)) if len(s) else np.inf for s in seen]
        assert bound[arm] >= max(bound) - 1e-5
    assert arms[:K].tolist() == [0, 1, 2]
    np.testing.assert_allclose(states[-1].count, np.bincount(arms, minlength=K))


@pytest.mark.parametrize("policy", (Exp3(1), Hedge(1)))
def test_weights_are_exponential_in_the_losses(policy):
    given = rewards(1)
    arms, states = played(policy, given)
    loss, chance = np.zeros(K), np.full(K, 1 / K)
    for t, (arm, reward) in enumerate(zip(arms, given, strict=True)):
        own = (np.arange(K) == arm) / chance if isinstance(policy, Exp3) else np.ones(K)
        loss = loss + own * (1 - reward)
        np.testing.assert_allclose(states[t].loss, loss, rtol=1e-4)
        rate = np.sqrt(np.log(K) / (K * (t + 2))) if isinstance(policy, Exp3) else np.sqrt(8 * np.log(K) / (t + 2))
        chance = np.exp(-rate * (loss - loss.min()))
        chance /= chance.sum()
        np.testing.assert_allclose(policy.chance(states[t]), chance, rtol=1e-4, atol=1e-7)
    again, _ = played(policy, given)
    other, _ = played(dataclasses.replace(policy, seed=2), given)
    assert (again == arms).all() and (other != arms).any()


@dataclasses.dataclass(frozen=True)
class Unweighted(Exp3):
    """A planted fault: losses that are not divided by the chance of being seen."""

    def observe(self, state, arm, reward):
        return dataclasses.replace(state, loss=state.loss.at[arm].add(1 - reward[arm]), rounds=state.rounds + 1)


def bias(policy):
    """How far the mean of the estimated losses is from the true ones, behind a round that made the arms unequal."""
    reward = jnp.asarray(RATES, jnp.float32)
    start = dataclasses.replace(policy.init(K), loss=jnp.asarray([0.0, 2.0, 4.0]), rounds=jnp.int32(3))

    def one(key):
        state = dataclasses.replace(start, key=key)
        arm, state = policy.choose(state)
        return policy.observe(state, arm, reward).loss - start.loss

    estimates = jax.vmap(one)(jax.random.bits(jax.random.key(0), (20_000, 2), jnp.uint32))
    return np.abs(np.asarray(estimates.mean(0)) - (1 - RATES)).max()


def test_estimated_losses_are_unbiased_and_a_fault_is_caught():
    assert bias(Exp3()) < 0.03 < 0.1 < bias(Unweighted())


@pytest.mark.parametrize(("policy", "share"), [(Ucb(0.3), 0.6), (Exp3(), 0.4), (Hedge(), 0.85)])
def test_the_better_arm_is_played_more_and_more(policy, share):
    arms, _ = played(policy, rewards(2, 400))
    assert (arms[200:] == 1).mean() > max(share, (arms[:100] == 1).mean() - 0.05)


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="width: got -1"):
        Ucb(-1)
