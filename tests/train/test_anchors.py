"""Anchors, masks and chain sampling against loops that say what they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.train import anchors, unroll

MASK = np.array([0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 0], bool)


@pytest.mark.parametrize("prompt_end", [True, False])
def test_anchors_are_distinct_sorted_and_have_a_label(prompt_end):
    fits = {t for t in range(len(MASK) - 1) if MASK[t + 1] and (prompt_end or MASK[t])}
    seen = set()
    for seed in range(40):
        at, real = anchors.random_anchors(jax.random.key(seed), jnp.asarray(MASK), 4, prompt_end)
        at, real = np.asarray(at), np.asarray(real)
        assert real.all() and (np.diff(at) > 0).all() and set(at.tolist()) <= fits
        seen |= set(at.tolist())
    assert seen == fits
    at, real = anchors.random_anchors(jax.random.key(0), jnp.asarray(MASK), 20, prompt_end)
    assert real.sum() == len(fits) and at[real].tolist() == sorted(fits) and (at[~real] == 0).all()


def test_anchors_are_uniform():
    draw = jax.vmap(lambda key: anchors.random_anchors(key, jnp.asarray(MASK), 2)[0])
    at = np.asarray(draw(jax.random.split(jax.random.key(0), 4000)))
    count = np.bincount(at.ravel(), minlength=12)
    expected = 8000 / (count > 0).sum()
    assert (np.abs(count[count > 0] - expected) < 6 * np.sqrt(expected)).all()


def test_no_label_no_anchor():
    _, real = anchors.random_anchors(jax.random.key(0), jnp.zeros(5, bool), 3)
    assert not real.any()


def test_labels_are_the_tokens_behind():
    tokens = jnp.arange(100, 112)
    found, counts = anchors.labels(tokens, jnp.asarray(MASK), jnp.array([2, 9, 0]), jnp.array([True, True, False]), 4)
    np.testing.assert_array_equal(found[0], [103, 104, 105, 106])
    np.testing.assert_array_equal(counts, [[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_the_block_mask_is_dflashs(causal, window):
    at, real, rows, context = np.array([2, 5, 0]), np.array([True, True, False]), 3, 8
    found = np.asarray(anchors.block_mask(jnp.asarray(at), jnp.asarray(real), rows, context, causal, window))
    expected = np.zeros((9, context + 9), bool)
    for b, i in np.ndindex(3, rows):
        query = at[b] + i
        for t in range(context):
            expected[b * rows + i, t] = real[b] and t < at[b] and (window is None or t >= query - (window - 1))
        for j in range(rows):
            near = window is None or abs(i - j) < window
            expected[b * rows + i, context + b * rows + j] = near and (j <= i or not causal)
    np.testing.assert_array_equal(found, expected)
    assert found.any(1).all()


def test_the_unroll_mask_is_eagle_threes():
    t, steps = 5, 3
    found = np.asarray(unroll.unroll_mask(t, steps)).reshape(steps, t, steps, t)
    for j, q, s, k in np.ndindex(steps, t, steps, t):
        assert found[j, q, s, k] == (k <= q if s == 0 else s <= j and k == q)


def test_chains_are_dropped_at_random_and_those_that_are_none_first():
    assert unroll.kept_rows(12, 4, 0.7, 0.2) == (12, 8, 5, 4) and unroll.kept_rows(3, 5, 0.5) == (3, 1, 1, 1, 1)
    real = np.array([False, True, True, True, False, True])
    orders = [np.asarray(unroll.conditional_drop(jax.random.key(i), jnp.asarray(real))) for i in range(30)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(6)) and real[order[:4]].all()
    assert len({tuple(order[:2].tolist()) for order in orders}) > 5


def test_chain_mistakes_are_named():
    with pytest.raises(ValueError, match="rate, floor: got 1.5"):
        unroll.kept_rows(10, 2, 1.5)
