"""Trees level by level, and first levels from the target's logits."""

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import tree as trees
from spec_jax.topology.slicing import by_level, target_initialised
from spec_jax.topology.static import likeliest, medusa, place
from tests.topology import kit

SHAPE = likeliest((0.6, 0.3, 0.1), 14, 4)


def test_a_slice_of_the_mask_is_the_mask_of_the_slice():
    sorted_shape, sizes = by_level(SHAPE)
    assert sizes[0] == 1 and sizes[-1] == SHAPE.nodes and len(sizes) == SHAPE.depth + 1
    assert list(sorted_shape.depths) == sorted(SHAPE.depths)
    whole = np.asarray(trees.ancestors(jnp.asarray(sorted_shape.parent)))
    for depth, size in enumerate(sizes):
        assert sum(d <= depth for d in SHAPE.depths) == size
        np.testing.assert_array_equal(whole[:size, :size], trees.ancestors(jnp.asarray(sorted_shape.parent[:size])))
    ids = jnp.arange(12).reshape(4, 3) + 1
    chance = jnp.array([[0.6, 0.3, 0.1]])
    a, b = (kit.paths(jax.jit(lambda i, s=s: place(s, kit.ANCHOR, i, chance))(ids)) for s in (SHAPE, sorted_shape))
    assert a.keys() == b.keys()


def test_the_first_level_is_the_target_s():
    shape = medusa([(0,), (1,), (0, 0), (2,)])
    logits = jnp.log(jnp.array([0.1, 0.0, 0.5, 0.4]))
    ids, chance = jnp.array([[3, 1, 0]]), jnp.array([[0.5, 0.3, 0.1]])
    build = jax.jit(lambda z: target_initialised(shape, kit.ANCHOR, z, ids, chance))
    draft = build(logits)
    known = kit.check_scored(draft, shape.nodes)
    assert {path: round(c, 4) for path, c in known.items()} == {(2,): 0.5, (3,): 0.4, (2, 3): 0.25, (0,): 0.1}
    banned = kit.paths(build(logits.at[0].set(-jnp.inf)))
    assert set(banned) == {(2,), (3,), (2, 3)}
