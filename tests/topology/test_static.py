"""Templates against plain Python: Medusa's lists, the likeliest shape, and what tokens they are filled with."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_jax.topology.static import Template, likeliest, medusa, place, place_below
from tests.topology import kit

CHOICES = [(0,), (0, 0), (1,), (0, 1), (0, 0, 0), (1, 0), (0, 0, 2)]
SHAPE = medusa(CHOICES)
D, K = SHAPE.depth, SHAPE.width
PLACE = jax.jit(lambda anchor, ids, chance: place(SHAPE, anchor, ids, chance))


def ranks_on_paths(template):
    names = [()]
    for parent, rank in zip(template.parent[1:], template.rank[1:], strict=True):
        names.append((*names[parent], rank))
    return names[1:]


def test_medusa_lists():
    assert ranks_on_paths(SHAPE) == CHOICES
    assert SHAPE.depths == (0, 1, 2, 1, 2, 3, 2, 3) and (SHAPE.nodes, D, K) == (8, 3, 3)
    assert medusa([]) == Template((-1,), (0,)) and hash(medusa(CHOICES)) == hash(SHAPE)


@pytest.mark.parametrize("choices", [[(0, 0), (0,)], [(0,), (0,)], [()], [(1,), (0, 1)]])
def test_lists_that_are_no_tree_are_refused(choices):
    with pytest.raises(ValueError, match="choices: got"):
        medusa(choices)


@pytest.mark.parametrize(
    ("parent", "rank", "message"),
    [
        ((), (), "parent: got"),
        ((-1, 0), (0,), "parent: got"),
        ((0,), (0,), "parent: got"),
        ((-1, 1), (0, 0), "takes an earlier node"),
        ((-1, -1), (0, 0), "takes an earlier node"),
        ((-1, 0, 0), (0, 1, 1), "once per parent"),
        ((-1, 0), (0, -1), "once per parent"),
    ],
)
def test_shapes_that_are_no_tree_are_refused(parent, rank, message):
    with pytest.raises(ValueError, match=message):
        Template(parent, rank)


@pytest.mark.parametrize("rates", [(0.5,), (0.6, 0.3), (0.4, 0.4, 0.1), (0.55, 0.10, 0.05, 0.03, 0.02, 0.01)])
@pytest.mark.parametrize("depth", [1, 3])
def test_every_prefix_is_the_likeliest_tree_of_its_size(rates, depth):
    every = [p for d in range(1, depth + 1) for p in itertools.product(range(len(rates)), repeat=d)]
    chance = {p: np.prod([rates[r] for r in p]) for p in every}
    template = likeliest(rates, 12, depth)
    assert template.nodes == min(12, 1 + len(every))
    got = [chance[p] for p in ranks_on_paths(template)]
    assert got == pytest.approx(sorted(chance.values(), reverse=True)[: len(got)])


def filled(ids, chance, choices=CHOICES):
    """{tokens on the path: chance} of the template's nodes, by rank; a token below 0 ends a path."""
    found = {}
    for path in choices:
        tokens = tuple(int(ids[d, r]) for d, r in enumerate(path))
        if min(tokens) >= 0:
            found[tokens] = np.prod([chance[d, r] for d, r in enumerate(path)])
    return found


def marginals(seed):
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(9)[:K] for _ in range(D)])
    ids = np.where(rng.random(ids.shape) < 0.15, -1, ids)
    return ids, -np.sort(-rng.uniform(0.01, 1, (D, K)), axis=1)


@given(st.integers(0, 2**16))
def test_a_template_is_filled_by_depth_and_rank(seed):
    ids, chance = marginals(seed)
    draft = PLACE(kit.ANCHOR, jnp.asarray(ids), jnp.asarray(chance, jnp.float32))
    known = kit.check_scored(draft, SHAPE.nodes)
    assert draft.tree.tokens[0] == kit.ANCHOR
    assert known == {path: pytest.approx(c, rel=1e-4) for path, c in filled(ids, chance).items()}


def test_many_rows_and_one_row_of_chances():
    ids, chance = (jnp.stack([jnp.asarray(x) for x in rows]) for rows in zip(*map(marginals, range(3)), strict=True))
    many = jax.jit(jax.vmap(lambda i, c: place(SHAPE, kit.ANCHOR, i, c)))(ids, chance)
    for r in range(3):
        kit.same(kit.row(many, r), PLACE(kit.ANCHOR, ids[r], chance[r]))
    alike = jnp.broadcast_to(chance[0, :1], chance[0].shape)
    kit.same(place(SHAPE, kit.ANCHOR, ids[0], chance[0, :1]), place(SHAPE, kit.ANCHOR, ids[0], alike))


@given(st.integers(0, 2**16))
def test_tokens_may_depend_on_the_parent_s(seed):
    rng = np.random.default_rng(seed)
    table = np.stack([rng.permutation(9)[:K] for _ in range(9)])
    table = np.where(rng.random(table.shape) < 0.2, -1, table)
    chance = np.full((D, K), [0.6, 0.2, 0.1])
    draft = BELOW(jnp.asarray(table), jnp.asarray(chance, jnp.float32))
    want = {}
    for path in CHOICES:
        tokens = [7]
        for r in path:
            tokens.append(int(table[tokens[-1], r]) if tokens[-1] >= 0 else -1)
        if min(tokens) >= 0:
            want[tuple(tokens[1:])] = pytest.approx(np.prod([chance[0, r] for r in path]), rel=1e-4)
    assert kit.check_scored(draft, SHAPE.nodes) == want


BELOW = jax.jit(
    lambda table, chance: place_below(SHAPE, kit.ANCHOR, lambda t, _: jnp.where(t[:, None] < 0, -1, table[t]), chance)
)


def test_too_few_depths_or_ranks_are_refused():
    ids, chance = jnp.zeros((D, K), jnp.int32), jnp.ones((D, K))
    with pytest.raises(ValueError, match="ids: got 2 depths, takes as many as the template has, 3"):
        place(SHAPE, kit.ANCHOR, ids[:2], chance[:2])
    with pytest.raises(ValueError, match="ids: got 2 ranks, takes as many as the template has, 3"):
        place(SHAPE, kit.ANCHOR, ids[:, :2], chance[:, :2])
