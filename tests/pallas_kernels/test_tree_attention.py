"""Tree attention against one softmax over prefix and tree, in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import tree_attention


@pytest.mark.parametrize("length", (1, 127, 128, 129, 300))
def test_long_prefixes_in_chunks_equal_one_softmax(length):
    rng = np.random.default_rng(length)
    n, slots = 16, 333
    q = jnp.asarray(rng.normal(size=(2, n, 4, 8)), jnp.float32)
    cache = [jnp.asarray(rng.normal(size=(2, 2, slots, 8)), jnp.float32) for _ in range(2)]
    tree = [jnp.asarray(rng.normal(size=(2, 2, n, 8)), jnp.float32) for _ in range(2)]
    mask = jnp.asarray(np.tril(rng.random((2, n, n)) < 0.5) | np.eye(n, dtype=bool))
    lengths = np.array([length, length // 2])
    got = tree_attention(q, cache[0], cache[1], jnp.asarray(lengths), tree[0], tree[1], mask, 0.3)
    keys, values = (np.concatenate(x, 2).repeat(2, axis=1) for x in zip(cache, tree, strict=True))
    allowed = np.concatenate(
        [np.broadcast_to((np.arange(slots) < lengths[:, None])[:, None], (2, n, slots)), np.asarray(mask)], 2
    )
    logits = np.einsum("bnhd,bhsd->bhns", np.asarray(q, np.float64), keys) * 0.3
    weights = np.where(allowed[:, None], np.exp(logits), 0.0)
    want = np.einsum("bhns,bhsd->bnhd", weights / weights.sum(-1, keepdims=True), values)
    np.testing.assert_allclose(got, want, atol=1e-5)
