"""Sequoia's dynamic programme against every tree of a size."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_jax.topology.sequoia import sequoia
from spec_jax.topology.static import likeliest

RATES = st.lists(st.floats(0, 1), min_size=1, max_size=3)


@functools.cache
def forests(nodes, ranks, depth, gaps, first=0):
    """Every way to spend `nodes` on children of ranks first ..: tuples of (rank, that child's own forest)."""
    if nodes == 0:
        return [()]
    if depth == 0 or first == ranks:
        return []
    found = list(forests(nodes, ranks, depth, gaps, first + 1)) if gaps else []
    for size in range(1, nodes + 1):
        for own in forests(size - 1, ranks, depth - 1, gaps):
            for rest in forests(nodes - size, ranks, depth, gaps, first + 1):
                found.append(((first, own), *rest))
    return found


def value(forest, rates):
    return 1 + sum(rates[rank] * value(own, rates) for rank, own in forest)


def expectation(template, rates):
    chance = [1.0]
    for parent, rank in zip(template.parent[1:], template.rank[1:], strict=True):
        chance.append(chance[parent] * rates[rank])
    return sum(chance), chance


@settings(max_examples=60)
@given(RATES, st.integers(1, 6), st.sampled_from([None, 1, 2, 3]), st.booleans())
def test_no_tree_expects_more(rates, nodes, depth, gaps):
    trees = forests(nodes - 1, len(rates), nodes if depth is None else depth, gaps)
    if not trees:
        with pytest.raises(ValueError, match=f"nodes: got {nodes}, takes at most"):
            sequoia(rates, nodes, depth, gaps)
        return
    template, expected = sequoia(rates, nodes, depth, gaps)
    assert expected == pytest.approx(max(value(tree, rates) for tree in trees))
    total, chance = expectation(template, rates)
    assert template.nodes == nodes and total == pytest.approx(expected)
    assert depth is None or template.depth <= depth
    if sorted(rates, reverse=True) == rates:
        assert all(a >= b - 1e-12 for a, b in zip(chance, chance[1:], strict=False))
    if not gaps:
        seen = {}
        for parent, rank in zip(template.parent[1:], template.rank[1:], strict=True):
            assert rank == seen.get(parent, 0), "elder siblings come first, without a gap"
            seen[parent] = rank + 1


@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=4), st.integers(1, 40), st.sampled_from([2, 4, 9]))
def test_for_descending_rates_it_is_the_greedy_tree(rates, nodes, depth):
    rates = sorted(rates, reverse=True)
    greedy = likeliest(rates, nodes, depth)
    _, expected = sequoia(rates, greedy.nodes, depth)
    assert expected == pytest.approx(expectation(greedy, rates)[0])


def test_for_rates_that_rise_the_greedy_tree_is_worse():
    rates = (0.5, 0.2, 0.9)
    best, expected = sequoia(rates, 4)
    assert expected == pytest.approx(1 + 0.5 + 0.2 + 0.9) and best.parent == (-1, 0, 0, 0)
    assert sequoia(rates, 4, gaps=True)[1] == pytest.approx(1 + 0.9 + 0.81 + 0.729)
    assert expectation(likeliest(rates, 4, 3), rates)[0] == pytest.approx(1 + 0.5 + 0.25 + 0.2)


def test_a_large_tree():
    """As many expected tokens as the greedy tree, of a size that enumeration does not reach."""
    rates = tuple(0.7 * 0.4 ** np.arange(8))
    assert sequoia(rates, 128)[1] == pytest.approx(expectation(likeliest(rates, 128, 128), rates)[0])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"rates": ()}, "rates: got"),
        ({"rates": (1.2,)}, "rates: got"),
        ({"nodes": 0}, "nodes: got 0"),
        ({"max_depth": -1}, "depth of 0 or more"),
        ({"max_depth": 0}, "nodes: got 4, takes at most 1"),
        ({"rates": (0.5,), "max_depth": 2}, "nodes: got 4, takes at most 3"),
    ],
)
def test_what_cannot_be_is_refused(how, message):
    with pytest.raises(ValueError, match=message):
        sequoia(**{"rates": (0.5, 0.2), "nodes": 4, **how})
