import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_jax import tree as trees
from spec_jax.topology.pool import Pool, best

SIZE = 10
ancestors = jax.jit(trees.ancestors)
select = jax.jit(best, static_argnums=2)


@st.composite
def pools(draw):
    """A pool of random nodes, some of them unused, with chances that fall along paths (and often tie)."""
    parent = [draw(st.integers(-1, i - 1)) for i in range(SIZE)]
    step = [draw(st.sampled_from((0.0, -0.5, -1.0, -1.5, -np.inf))) for _ in range(SIZE)]
    chance = []
    for p, s in zip(parent, step, strict=True):
        chance.append(s + (chance[p] if p >= 0 else 0.0))
    array = lambda x, dtype: jnp.asarray(np.array(x, dtype))  # noqa: E731
    return Pool(array(range(100, 100 + SIZE), np.int32), array(parent, np.int32), array(chance, np.float32))


@given(pools(), st.sampled_from((1, 2, 6, 11, 14)))
def test_the_best_candidates_with_their_ancestors(pool, nodes):
    draft = select(pool, jnp.int32(7), nodes)
    tokens, parent, valid = (np.asarray(x) for x in jax.tree.leaves(draft.tree))
    chance, above = np.asarray(pool.log_chance), np.asarray(pool.parent)
    kept = min(nodes - 1, int(np.isfinite(chance).sum()))
    assert valid.tolist() == [True] * (kept + 1) + [False] * (nodes - 1 - kept)
    assert tokens[0] == 7 and parent[0] == -1 and draft.confidence[0] == 1.0
    assert not tokens[kept + 1 :].any() and not parent[kept + 1 :].any() and not draft.confidence[kept + 1 :].any()
    pick = tokens[1 : kept + 1] - 100
    assert len(set(pick)) == kept
    np.testing.assert_array_equal(chance[pick], np.sort(chance[np.isfinite(chance)])[::-1][:kept])
    for i, p in enumerate(pick, 1):
        assert parent[i] < i
        assert (above[p] == -1 and parent[i] == 0) or tokens[parent[i]] - 100 == above[p]
    walked = np.log(np.maximum(draft.confidence, 1e-9)) @ np.asarray(ancestors(draft.tree.parent)).T
    np.testing.assert_allclose(walked[1 : kept + 1], chance[pick], atol=1e-4)


def test_a_pool_under_vmap_and_nan_is_unused():
    pool = Pool(
        jnp.array([[3, 4, 5], [6, 7, 8]]),
        jnp.array([[-1, 0, -1], [-1, -1, 1]]),
        jnp.array([[-1.0, -3.0, -2.0], [jnp.nan, -0.5, -0.5]]),
    )
    tree = jax.vmap(lambda pool, anchor: best(pool, anchor, 4))(pool, jnp.array([1, 2])).tree
    assert tree.tokens.tolist() == [[1, 3, 5, 4], [2, 7, 8, 0]]
    assert tree.parent.tolist() == [[-1, 0, 0, 1], [-1, 0, 1, 0]]
    assert tree.valid.tolist() == [[True] * 4, [True, True, True, False]]


def test_nodes_that_hold_no_root():
    with pytest.raises(ValueError, match="nodes: got 0"):
        best(Pool(jnp.array([1]), jnp.array([-1]), jnp.array([0.0])), jnp.int32(0), 0)
