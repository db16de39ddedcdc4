"""A bank of trees (EntMTP) is the tree it chooses, padded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_jax.topology.bank import TopologyBank, entropy, running
from spec_jax.topology.static import likeliest, medusa, place
from tests.topology import kit

TEMPLATES = (
    likeliest((0.9,), 6, 5),
    likeliest((0.5, 0.3), 9, 3),
    medusa([(0,), (1,), (2,)]),
    medusa([]),
)
BANK = TopologyBank(TEMPLATES, (0.5, 1.0, 2.0))
D, K = 5, 3
PLACE = jax.jit(BANK.place)
ALONE = jax.jit(place, static_argnums=0)


@given(st.integers(0, 2**16), st.integers(0, 3))
def test_the_chosen_tree_padded(seed, which):
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(9)[:K] for _ in range(D)])
    ids = jnp.asarray(np.where(rng.random(ids.shape) < 0.15, -1, ids))
    chance = jnp.asarray(-np.sort(-rng.uniform(0.05, 1, (D, K)), axis=1), jnp.float32)
    known = kit.check_scored(PLACE(which, kit.ANCHOR, ids, chance), BANK.nodes)
    alone = kit.check_scored(ALONE(TEMPLATES[which], kit.ANCHOR, ids, chance), TEMPLATES[which].nodes)
    assert known == pytest.approx(alone, rel=1e-5)


def test_trees_of_one_level():
    bank = TopologyBank((medusa([(0,), (1,)]), medusa([(0,)])), (1.0,))
    ids, chance = jnp.array([[3, 4]]), jnp.array([[0.5, 0.4]])
    assert [set(kit.paths(bank.place(jnp.int32(i), kit.ANCHOR, ids, chance))) for i in range(2)] == [
        {(3,), (4,)},
        {(3,)},
    ]


@pytest.mark.parametrize(("value", "which"), [(0.0, 0), (0.49, 0), (0.5, 1), (1.7, 2), (2.0, 3), (9.0, 3)])
def test_the_entropy_chooses(value, which):
    assert int(BANK.choose(jnp.float32(value))) == which
    assert int(TopologyBank(TEMPLATES[:1], ()).choose(jnp.float32(value))) == 0


def test_entropy_and_its_running_estimate():
    assert float(entropy(jnp.log(jnp.array([0.5, 0.25, 0.25, 0.0])))) == pytest.approx(1.5 * np.log(2))
    assert float(entropy(jnp.array([0.0, -jnp.inf]))) == 0
    assert float(running(jnp.float32(1.0), jnp.float32(2.0), keep=0.75)) == pytest.approx(1.25)


def test_rows_choose_for_themselves():
    ids, chance = jnp.arange(15).reshape(D, K), jnp.full((D, K), 0.5)
    many = jax.jit(jax.vmap(lambda w: BANK.place(w, kit.ANCHOR, ids, chance)))(jnp.arange(4))
    assert many.tree.valid.sum(-1).tolist() == [t.nodes for t in TEMPLATES]


@pytest.mark.parametrize(("templates", "thresholds"), [((), ()), (TEMPLATES, (0.5, 1.0)), (TEMPLATES, (1.0, 0.5, 2.0))])
def test_settings_that_cannot_work_are_refused(templates, thresholds):
    with pytest.raises(ValueError, match="thresholds: got"):
        TopologyBank(templates, thresholds)


def test_too_few_ranks_are_refused():
    with pytest.raises(ValueError, match="ids: got 5 depths of 2 ranks, takes 5 of 3"):
        BANK.place(jnp.int32(0), kit.ANCHOR, jnp.zeros((D, 2), jnp.int32), jnp.ones((D, 2)))
