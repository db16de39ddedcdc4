import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.train import vocabulary


def test_the_most_frequent_tokens_are_kept_in_order():
    counts = vocabulary.count([np.array([5, 5, 2, 7]), np.array([], int), np.array([2, 5, 1])], 9)
    np.testing.assert_array_equal(counts, [0, 1, 2, 0, 0, 3, 0, 1, 0])
    np.testing.assert_array_equal(vocabulary.most_frequent(counts, 3), [1, 2, 5])  # of 1 and 7 the lower
    np.testing.assert_array_equal(vocabulary.most_frequent(counts, 3, always=[8]), [2, 5, 8])


def test_files_have_offsets_and_flags():
    kept = np.array([1, 2, 5], np.int32)
    d2t, t2d = vocabulary.offsets(kept), vocabulary.flags(kept, 7)
    np.testing.assert_array_equal(np.arange(3) + d2t, kept)
    np.testing.assert_array_equal(np.flatnonzero(t2d), kept)


def test_laws_and_labels_map():
    kept = jnp.array([1, 2, 5])
    np.testing.assert_array_equal(
        vocabulary.to_draft(jnp.array([[0, 1, 2], [3, 5, 6]]), kept), [[-1, 0, 1], [-1, 2, -1]]
    )
    z = jnp.asarray(np.random.default_rng(0).normal(0, 2, (4, 7)))
    np.testing.assert_array_equal(vocabulary.restrict(z, kept), z[:, kept])
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    np.testing.assert_allclose(vocabulary.kept_mass(z, kept), p[:, kept].sum(-1), rtol=1e-5)
    assert vocabulary.restrict(z, None) is z and (vocabulary.kept_mass(z, None) == 1).all()
    np.testing.assert_array_equal(vocabulary.to_draft(jnp.array([3]), None), [3])


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="texts: got token ids 3 .. 9"):
        vocabulary.count([np.array([3, 9])], 9)
    with pytest.raises(ValueError, match="size: got 10, takes 1 .. 9"):
        vocabulary.most_frequent(np.zeros(9, int), 10)
    with pytest.raises(ValueError, match="size: got 1, takes 2"):
        vocabulary.most_frequent(np.zeros(9, int), 1, always=[0, 4])
