"""Spine trees (GOOSE) against plain Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_jax.topology.spine import spine_tree
from tests.topology import kit

RATES = (0.5, 0.2, 0.1)


@functools.cache
def builder(nodes):
    return jax.jit(lambda spine, following: spine_tree(spine, following, jnp.array(RATES), nodes))


def hung(spine, following):
    """{path: chance} of the spine and its branches."""
    found = {(): 1.0, **kit.plain_paths(spine)}
    tokens, parent, valid = (np.asarray(x) for x in jax.tree.leaves(spine.tree))
    names = [()]
    for i in range(1, len(tokens)):
        names.append((*names[parent[i]], int(tokens[i])))
    for i in np.flatnonzero(valid):
        children = [j for j in range(1, len(tokens)) if valid[j] and parent[j] == i]
        left = max(1e-6, 1 - sum(float(spine.confidence[j]) for j in children))
        for token, rate in zip(following[i].tolist(), RATES, strict=True):
            path = (*names[i], token)
            if token >= 0 and path not in found:
                found[path] = found[names[i]] * left * rate
    del found[()]
    return found


@given(st.integers(0, 2**16), st.sampled_from([2, 6, 30]))
def test_branches_on_every_node(seed, nodes):
    spine = kit.random_draft(seed)
    following = np.random.default_rng(seed + 1).integers(-1, kit.V + 2, (7, 3))
    want = hung(spine, following)
    known = kit.check_scored(builder(nodes)(spine, jnp.asarray(following)), nodes)
    assert list(known.values()) == pytest.approx(sorted(want.values(), reverse=True)[: nodes - 1], rel=1e-4)
    assert len(known) == min(nodes - 1, len(want))
    assert all(abs(c / want[path] - 1) < 1e-4 for path, c in known.items())


def test_a_sure_spine_is_deep_and_an_unsure_one_wide():
    following = jnp.arange(9 * 3).reshape(9, 3) + 100
    depth_of = lambda confidence: max(  # noqa: E731
        map(len, kit.paths(builder(9)(kit.chain_draft(range(8), [confidence] * 8), following)))
    )
    assert depth_of(0.95) == 8 and depth_of(0.3) <= 3


def test_a_row_of_many_is_the_row_alone():
    spines = [kit.random_draft(i) for i in range(3)]
    following = jnp.asarray(np.random.default_rng(0).integers(-1, 6, (3, 7, 3)))
    stack = jax.tree.map(lambda *x: jnp.stack(x), *spines)
    many = jax.jit(jax.vmap(lambda s, f: spine_tree(s, f, jnp.array(RATES), 9)))(stack, following)
    for i in range(3):
        kit.same(kit.row(many, i), builder(9)(spines[i], following[i]))
