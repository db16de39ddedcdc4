"""Grown trees against a beam written with dictionaries, and against all paths there are."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_jax.topology.expander import ContextFree, Marginals
from spec_jax.topology.growth import Growth, grow
from spec_jax.topology.marginals import best_first
from tests.topology import grown as toy

B, V = 3, 5
ANCHOR = jnp.array([1, 2, 0])


@functools.partial(jax.jit, static_argnums=0)
def grown(growth, tables, active):
    expander = toy.TableExpander()
    pool, logits = expander.start(growth, tables, ANCHOR)
    return grow(growth, expander, tables, pool, ANCHOR, logits, toy.by_law, active)


def run(growth, tables, active=(True,) * B):
    return grown(growth, tables, jnp.array(active))


def oracle(growth, table, anchor):
    """One row's tree: {path: chance}, in order; and the expected number of accepted nodes after each level."""
    log_q = np.asarray(jax.nn.log_softmax(table), np.float64)
    pool, frontier, values = {}, {(): 0.0}, [0.0]
    for _ in range(growth.depth):
        offered = {}
        for path, chance in frontier.items():
            law = log_q[(0, anchor, *path)[-2:]] if path else log_q[0, anchor]
            for v in np.argsort(-law)[: growth.children]:
                offered[*path, int(v)] = chance + law[v]
        frontier = toy.best_paths(offered, growth.width)
        pool |= offered if growth.spare else frontier
        values.append(sum(np.exp(list(toy.best_paths(pool, growth.nodes - 1).values()))))
        if values[-1] - values[-2] <= growth.delta:
            break
    return toy.best_paths(pool, growth.nodes - 1), values


SETTINGS = {
    "EAGLE-2": Growth(nodes=12, depth=4, width=3, children=3),
    "PCTree, more room than nodes": Growth(nodes=40, depth=3, width=3, children=3),
    "few children": Growth(nodes=10, depth=4, width=4, children=2),
    "many children": Growth(nodes=10, depth=3, width=2, children=5),
    "DARTree fixed": Growth(nodes=10, depth=3, width=3, children=3, spare=False),
    "OPT-Tree": Growth(nodes=8, depth=5, width=7, children=5, delta=0.25),
    "chain": Growth(nodes=5, depth=4, width=1, children=1),
    "one level": Growth(nodes=4, depth=1, width=2, children=3),
    "root alone": Growth(nodes=1, depth=3, width=2, children=2),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_equal_to_a_beam(name, seed):
    growth, tables = SETTINGS[name], toy.tables(seed, B, V)
    result = run(growth, tables)
    for b in range(B):
        got, (want, _) = toy.paths(toy.row(result.draft, b)), oracle(growth, tables[b], int(ANCHOR[b]))
        assert list(got) == list(want)
        np.testing.assert_allclose(np.log(list(got.values())), list(want.values()), atol=1e-4)


def test_a_wide_frontier_finds_the_best_tree_there_is():
    growth, tables = Growth(nodes=9, depth=3, width=25, children=V), toy.tables(7, B, V)
    log_q = np.asarray(jax.nn.log_softmax(tables), np.float64)
    result = run(growth, tables)
    for b in range(B):
        chances = {}
        for path in itertools.chain(*(itertools.product(range(V), repeat=d) for d in (1, 2, 3))):
            context = (0, int(ANCHOR[b]), *path)
            chances[path] = sum(log_q[b][context[i : i + 3]] for i in range(len(path)))
        assert list(toy.paths(toy.row(result.draft, b))) == list(toy.best_paths(chances, 8))


def test_growth_that_gains_nothing_stops_and_loses_nothing():
    growth = Growth(nodes=4, depth=6, width=3, children=3)
    flat = toy.tables(1, B, V, scale=0.01)
    assert len(oracle(growth, flat[0], 1)[1]) == 3
    for b in range(B):
        got = toy.paths(toy.row(run(growth, flat).draft, b))
        assert list(got) == list(oracle(growth, flat[b], int(ANCHOR[b]))[0])
        assert all(len(path) == 1 for path in got)


@given(st.integers(0, 10**6), st.tuples(*[st.booleans()] * B), st.sampled_from(("EAGLE-2", "OPT-Tree")))
@settings(max_examples=20)
def test_rows_are_independent_and_expansions_are_told(seed, active, name):
    growth, tables = SETTINGS[name], toy.tables(seed, B, V)
    every, some = run(growth, tables), run(growth, tables, active)
    for b in np.flatnonzero(active):
        jax.tree.map(lambda x, y, b=b: np.testing.assert_array_equal(x[b], y[b]), every.draft, some.draft)
    for b in range(B):
        draft, expanded = toy.row(every.draft, b), np.asarray(every.expanded[b])
        known = [(), *toy.paths(draft)]
        inner = set(np.asarray(draft.tree.parent)[np.asarray(draft.tree.valid)][1:].tolist())
        assert inner <= set(np.flatnonzero(expanded >= 0)) and expanded[0] == 0
        assert (expanded[len(known) :] == -1).all()
        for i in np.flatnonzero(expanded >= 0):
            path = known[i]
            assert every.trace[b, expanded[i], : len(path)].tolist() == list(path)
            assert every.pool.tokens[b, expanded[i]] == (path[-1] if path else int(ANCHOR[b]))


def test_context_free_logits_give_ddtree():
    logits = jnp.asarray(np.random.default_rng(3).normal(0, 1.5, (B, 4, V)), jnp.float32)
    growth = Growth(nodes=14, depth=4, width=13, children=V)

    @jax.jit
    def both(logits):
        result = grow(growth, ContextFree(), None, Marginals(logits, jnp.int32(1)), ANCHOR, logits[:, 0], toy.by_law)
        ids = jnp.broadcast_to(jnp.arange(V), (4, V))
        one = lambda z, anchor: best_first(jax.nn.log_softmax(z), ids, anchor, 14)  # noqa: E731
        return result.draft, jax.vmap(one)(logits, ANCHOR)

    drafts, wants = jax.device_get(both(logits))
    for b in range(B):
        assert list(toy.paths(toy.row(drafts, b))) == list(toy.paths(toy.row(wants, b)))


def test_bad_settings_are_refused():
    for name, value in {"nodes": 0, "depth": 0, "width": 0, "children": 0, "candidates": 2}.items():
        with pytest.raises(ValueError, match=f"{name}: got {value}"):
            Growth(**{**dict(nodes=4, depth=2, width=2, children=3), name: value})
    with pytest.raises(ValueError, match="delta: got -1"):
        Growth(4, 2, 2, 2, delta=-1)
    with pytest.raises((ValueError, TypeError), match="ranking"):
        Growth(4, 2, 2, 2, ranking="x")  # pyright: ignore
    with pytest.raises(ValueError, match="children: got 6, takes at most the number of candidates 5"):
        run(Growth(4, 2, 2, 6), toy.tables(0, B, V))
