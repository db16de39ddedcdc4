"""Drawn trees grown with an expander: equal to those drawn from tables, and known to the expander by number."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import tree as trees
from spec_jax.topology import sampled
from spec_jax.topology.branching import Branching, branch
from tests.topology import grown
from tests.verify.walks import keys

B, V, START = 3, 5, 6
ANCHOR = jnp.array([1, 2, 0])


@functools.partial(jax.jit, static_argnums=0)
def run(shape, tables):
    expander, key = grown.TableExpander(), keys(B)
    pool, logits = expander.start(shape, tables, ANCHOR)

    def draw(logits, paths, depth, first):
        def one(z, first, key):
            law = jax.nn.log_softmax(z)
            drawn = sampled.siblings(key, law, max(shape.widths), START + depth, shape.replacement, first)
            return drawn, law

        return jax.vmap(jax.vmap(one, (0, 0, None)), (0, None, 0))(logits, first, key)

    return branch(shape, expander, tables, pool, ANCHOR, logits, draw)


SHAPES = [(2, 2, 1), (3, 1, 1), (1, 2, 2), (1, 1, 1), (3,)]


@pytest.mark.parametrize("replacement", (True, False))
@pytest.mark.parametrize("widths", SHAPES)
def test_equal_to_the_tree_drawn_from_a_table(widths, replacement):
    shape = Branching(widths, replacement)
    table = jnp.asarray(np.random.default_rng(1).normal(0, 1.5, (B, V, V)), jnp.float32)
    tables = jnp.broadcast_to(table[:, None], (B, V, V, V))
    draft, number, pool = run(shape, tables)
    assert draft.tree.tokens.shape == (B, shape.nodes) and number.shape == (shape.nodes,)
    assert draft.proposal == ("sampled" if replacement else "without_replacement")
    draft, number, pool = jax.device_get((draft, number, pool))
    depth = np.asarray(trees.depth(jnp.asarray(draft.tree.parent[0])))
    assert shape.depth == depth.max() and ((number >= 0) == (depth < shape.depth)).all()

    @jax.jit
    @jax.vmap
    def drawn(key, anchor, table):
        law = lambda token, depth: jax.nn.log_softmax(table[token])  # noqa: E731
        return sampled.branching(key, anchor, law, widths, jnp.int32(START), replacement)

    want = drawn(keys(B), ANCHOR, table)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), draft, want)
    for b in range(B):
        for i in np.flatnonzero(number >= 0):
            assert pool.tokens[b, number[i]] == draft.tree.tokens[b, i]


def test_a_law_with_too_few_tokens_leaves_nodes_out():
    tables = grown.tables(2, B, V).at[..., 2:].set(-jnp.inf)
    draft, *_ = run(Branching((3, 2)), tables)
    valid, parent = np.asarray(draft.tree.valid), np.asarray(draft.tree.parent)
    assert (valid.sum(1) == 1 + 2 + 4).all() and valid[np.arange(B)[:, None], np.maximum(parent, 0)][valid].all()
    assert not np.asarray(draft.tree.tokens)[~valid].any() and not np.asarray(draft.confidence)[~valid].any()


def test_bad_widths_are_refused():
    for widths in ((), (2, 0)):
        with pytest.raises(ValueError, match="widths: got"):
            Branching(widths)
