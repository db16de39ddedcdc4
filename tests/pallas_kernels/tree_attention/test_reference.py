"""The XLA form against one dense softmax in float64, and what must hold of any implementation."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import tree_attention
from tests.pallas_kernels.tree_attention.cases import CASES, Case, arrays
from tests.pallas_kernels.tree_attention.check import check


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_a_dense_softmax(case):
    check(tree_attention, case)


@pytest.mark.parametrize("window", (None, 40))
def test_chunks_of_a_long_cache(window):
    check(tree_attention, Case(lengths=(3, 900), used=(16, 16), slots=1000, heads=2, kv=1, d=16, window=window))


def test_a_node_that_sees_nothing_gets_zeros():
    args = list(arrays(Case(lengths=(0,), used=(0,), n=4)))
    args[6] = jnp.zeros_like(args[6])
    np.testing.assert_array_equal(tree_attention(*args), 0)


def test_nan_that_a_node_sees_is_not_hidden():
    """Only those who don't see a broken row are kept from it."""
    args = list(arrays(Case(lengths=(20,), used=(4,), n=4, slots=32)))
    args[6] = jnp.asarray(np.eye(4, dtype=bool) | (np.arange(4) == 0))[None]
    args[5] = args[5].at[0, 0, 2].set(jnp.nan)
    broken = np.isnan(tree_attention(*args)).any(-1)[0]
    np.testing.assert_array_equal(broken[:, :2], np.array([False, False, True, False])[:, None].repeat(2, 1))
    assert not broken[:, 2:].any()
