"""Group tree optimisation against enumeration and plain NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.train import tree_reward
from spec_jax.tree import Tree

PARENT = np.array([-1, 0, 0, 1, 1, 3, 0])
TOKENS = np.array([9, 0, 1, 0, 2, 1, 2])
VALID = np.array([1, 1, 1, 1, 1, 1, 0], bool)
TREE = Tree(jnp.asarray(TOKENS), jnp.asarray(PARENT), jnp.asarray(VALID))
LAWS = np.random.default_rng(0).dirichlet(np.ones(3), 7)  # the target's law behind every node


def walk(draws):
    """Nodes accepted when the target's draw behind node i is draws[i]."""
    at, path = 0, []
    while True:
        found = [i for i in range(1, 7) if VALID[i] and PARENT[i] == at and TOKENS[i] == draws[at]]
        if not found:
            return path
        at = found[0]
        path.append(at)


def test_the_reward_is_the_expected_number_of_accepted_nodes():
    inner = [0, 1, 3]  # nodes with children
    expected = 0.0
    for draw in itertools.product(range(3), repeat=3):
        chance = np.prod([LAWS[i][token] for i, token in zip(inner, draw, strict=True)])
        expected += chance * len(walk(dict(zip(inner, draw, strict=True)) | {i: -1 for i in (2, 4, 5)}))
    log_chance = np.log(LAWS[np.maximum(PARENT, 0), np.minimum(TOKENS, 2)])
    found = tree_reward.tree_reward(TREE, jnp.asarray(log_chance))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_token_that_the_target_never_writes_adds_nothing():
    log_chance = jnp.where(jnp.arange(7) == 1, -jnp.inf, -0.5)
    value, gradient = jax.value_and_grad(lambda x: tree_reward.tree_reward(TREE, x))(log_chance)
    np.testing.assert_allclose(value, np.exp(-0.5), rtol=1e-6)
    assert np.isfinite(gradient).all()


def test_the_accepted_path_is_the_walk():
    for seed in range(20):
        choice = np.random.default_rng(seed).integers(0, 3, 7)
        found = tree_reward.longest_accepted(TREE, jnp.asarray(choice))
        assert np.flatnonzero(found).tolist() == walk(choice)


def test_advantages_are_gains_over_the_reference_standardised():
    reward, reference = np.array([2.0, 3.0, 1.0, 4.0]), np.array([1.0, 3.0, 1.5, 2.0])
    gain = reward - reference
    found = tree_reward.group_advantages(jnp.asarray(reward), jnp.asarray(reference))
    np.testing.assert_allclose(found, (gain - gain.mean()) / gain.std(), rtol=1e-5)
    same = tree_reward.group_advantages(jnp.ones(4), jnp.zeros(4))
    np.testing.assert_array_equal(same, 0)


def test_the_surrogate_is_ppos():
    rng = np.random.default_rng(0)
    new, old, advantage = rng.normal(-1, 0.5, (4, 3)), rng.normal(-1, 0.5, (4, 3)), rng.normal(size=4)
    mask = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]], bool)
    ratio = np.exp(new - old)
    gain = np.minimum(ratio * advantage[:, None], np.clip(ratio, 0.8, 1.2) * advantage[:, None])
    given = [jnp.asarray(x, jnp.float32) for x in (new, old, advantage)]
    np.testing.assert_allclose(tree_reward.clipped_surrogate(*given, jnp.asarray(mask)), -gain[mask].mean(), rtol=1e-5)
    dirty = given[0].at[2].set(-jnp.inf)
    value, gradient = jax.value_and_grad(tree_reward.clipped_surrogate)(dirty, *given[1:], jnp.asarray(mask))
    assert np.isfinite(value) and np.isfinite(gradient).all() and (np.asarray(gradient)[~mask] == 0).all()
    assert tree_reward.clipped_surrogate(*given, jnp.zeros((4, 3), bool)) == 0
