import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_jax import tree as trees
from spec_jax.tree import Draft, Law

N = 9
derived = jax.jit(lambda parent: (trees.ancestors(parent), trees.depth(parent)))


@st.composite
def parents(draw):
    return [-1] + [draw(st.integers(0, i - 1)) for i in range(1, N)]


@given(parents())
@settings(max_examples=50)
def test_ancestors_and_depth(parent):
    reach, depth = derived(jnp.array(parent))
    for node in range(N):
        path, at = set(), node
        while at >= 0:
            path.add(at)
            at = parent[at]
        assert set(np.flatnonzero(reach[node])) == path
        assert depth[node] == len(path) - 1


def test_one_node():
    assert trees.ancestors(jnp.array([-1])).tolist() == [[True]]
    assert trees.depth(jnp.array([-1])).tolist() == [0]


def test_a_long_chain():
    parent = jnp.arange(-1, 63)
    assert (trees.ancestors(parent) == jnp.tril(jnp.ones((64, 64), bool))).all()
    assert trees.depth(parent).tolist() == list(range(64))


def test_chain():
    for length in range(4):
        tree = trees.chain(jnp.int32(7), jnp.array([4, 5, 6]), jnp.int32(length))
        assert tree.tokens.tolist() == [7, 4, 5, 6] and tree.tokens.dtype == jnp.int32
        assert tree.parent.tolist() == [-1, 0, 1, 2]
        assert tree.valid.tolist() == [i <= length for i in range(4)]


def test_first_keeps_a_prefix_of_every_part():
    batch = lambda *shape: jnp.arange(np.prod((2, *shape))).reshape(2, *shape)  # noqa: E731
    tree = trees.Tree(batch(4), jnp.tile(jnp.array([-1, 0, 0, 1]), (2, 1)), batch(4) > 2)
    draft = Draft(tree, batch(4) / 8, Law(batch(4, 3) / 24, batch(4, 3)), "sampled")
    cut = trees.first(draft, 2)
    assert cut.proposal == "sampled"
    jax.tree.map(np.testing.assert_array_equal, cut, jax.tree.map(lambda x: x[:, :2], draft))
    assert cut.law is not None and cut.law.log_probs.shape == (2, 2, 3)
    assert trees.first(draft.replace(law=None), 3).law is None
