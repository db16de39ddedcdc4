"""Repair trees (CURE) against plain Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_jax.topology.repair import repair_tree
from tests.topology import kit

D, K = 5, 3


@functools.cache
def builder(repairs, length, margin):
    return jax.jit(lambda ids, chance: repair_tree(kit.ANCHOR, ids, chance, repairs, length, margin))


def block(seed):
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(9)[:K] for _ in range(D)])
    return ids, -np.sort(-rng.dirichlet(np.ones(K) * 0.7, D), axis=1) * 0.97


def repaired(ids, chance, repairs, length, margin):
    margins = chance[:, 0] - chance[:, 1]
    fragile = [d for d in np.argsort(margins) if margins[d] < margin][:repairs]
    found = {tuple(ids[: d + 1, 0].tolist()): np.prod(chance[: d + 1, 0]) for d in range(D)}
    for d in fragile:
        for end in range(d, min(D, d + length)):
            tokens = (*ids[:d, 0], ids[d, 1], *ids[d + 1 : end + 1, 0])
            found[tuple(map(int, tokens))] = np.prod(chance[:d, 0]) * chance[d, 1] * np.prod(chance[d + 1 : end + 1, 0])
    return found


@given(st.integers(0, 2**16), st.sampled_from([(2, 3, 1.0), (0, 2, 1.0), (5, 1, 0.4), (3, 9, 0.2)]))
def test_fragile_positions_are_repaired(seed, how):
    ids, chance = block(seed)
    draft = builder(*how)(jnp.asarray(ids), jnp.asarray(chance, jnp.float32))
    known = kit.check_scored(draft, 1 + D + how[0] * how[1])
    assert known == {path: pytest.approx(c, rel=1e-3) for path, c in repaired(ids, chance, *how).items()}


def test_only_the_least_sure_position_branches():
    ids = jnp.array([[0, 1], [2, 3], [4, 5]])
    chance = jnp.array([[0.9, 0.05], [0.4, 0.39], [0.8, 0.1]])
    got = kit.paths(builder(1, 2, 1.0)(ids, chance))
    assert set(got) == {(0,), (0, 2), (0, 2, 4), (0, 3), (0, 3, 4)}
    assert set(kit.paths(builder(3, 2, 0.005)(ids, chance))) == {(0,), (0, 2), (0, 2, 4)}


def test_many_rows():
    ids, chance = (jnp.stack([jnp.asarray(x) for x in rows]) for rows in zip(*map(block, range(3)), strict=True))
    many = jax.jit(jax.vmap(lambda i, c: repair_tree(kit.ANCHOR, i, c, 2, 3)))(ids, chance)
    for r in range(3):
        kit.same(kit.row(many, r), builder(2, 3, 1.0)(ids[r], chance[r]))


@pytest.mark.parametrize("how", [(6, 2), (-1, 2), (2, 0)])
def test_sizes_that_cannot_be_are_refused(how):
    ids, chance = block(0)
    with pytest.raises(ValueError, match=f"repairs: got {how[0]} of {how[1]} tokens"):
        repair_tree(kit.ANCHOR, jnp.asarray(ids), jnp.asarray(chance), *how)
    with pytest.raises(ValueError, match="for positions of at least 2"):
        repair_tree(kit.ANCHOR, jnp.asarray(ids[:, :1]), jnp.asarray(chance[:, :1]), 1, 1)
