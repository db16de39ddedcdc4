"""DDTree against its heap, and against all paths there are."""

import functools
import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_jax.topology.marginals import best_first
from tests.topology import grown

build = functools.partial(jax.jit, static_argnums=(3, 4))(best_first)


def heap(log_q, ids, n):
    """DDTree's heap: pop a node, push its next sibling and its first child."""
    order = np.argsort(-log_q, axis=1)
    top, ids = np.take_along_axis(log_q, order, 1), np.take_along_axis(ids, order, 1)
    found, waiting = {}, [(-top[0, 0], (0,))]
    while waiting and len(found) < n:
        score, ranks = heapq.heappop(waiting)
        if score == np.inf:
            break
        found[tuple(int(ids[d, r]) for d, r in enumerate(ranks))] = -score
        d, r = len(ranks) - 1, ranks[-1]
        if r + 1 < top.shape[1]:
            heapq.heappush(waiting, (score + top[d, r] - top[d, r + 1], (*ranks[:-1], r + 1)))
        if d + 1 < len(top):
            heapq.heappush(waiting, (score - top[d + 1, 0], (*ranks, 0)))
    return found


def marginals(seed, depth, m, scale):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, scale, (depth, m))
    log_q = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return log_q.astype(np.float32), np.stack([rng.permutation(2 * m)[:m] for _ in range(depth)]).astype(np.int32)


@given(st.integers(0, 10**6), st.sampled_from((0.1, 1.0, 4.0)))
@settings(max_examples=30)
@pytest.mark.parametrize(("depth", "m", "nodes"), [(15, 64, 64), (5, 4, 12), (3, 6, 1), (1, 3, 8), (4, 1, 5)])
def test_equal_to_the_heap(depth, m, nodes, seed, scale):
    log_q, ids = marginals(seed, depth, m, scale)
    got, want = grown.paths(build(log_q, ids, 9, nodes, "point")), heap(log_q.astype(float), ids, nodes - 1)
    assert len(got) == len(want)
    np.testing.assert_allclose(np.log(list(got.values())), list(want.values()), atol=1e-3)
    edge = min(want.values(), default=0.0)
    chance = lambda path: sum(log_q[d, list(ids[d]).index(v)] for d, v in enumerate(path))  # noqa: E731
    assert all(path in want or abs(chance(path) - edge) < 1e-3 for path in got)


@given(st.integers(0, 10**6))
@settings(max_examples=20)
def test_no_tree_of_its_size_is_likelier(seed):
    log_q, ids = marginals(seed, 3, 4, 1.0)
    every = {
        tuple(int(ids[d, r]) for d, r in enumerate(ranks)): sum(log_q[d, r] for d, r in enumerate(ranks))
        for ranks in itertools.chain(*(itertools.product(range(4), repeat=d) for d in (1, 2, 3)))
    }
    draft = build(log_q, ids, 9, 12, "point")
    assert list(grown.paths(draft)) == list(grown.best_paths(every, 11))


def test_candidates_that_are_none_and_the_kind_of_proposal():
    log_q = jnp.log(jnp.array([[0.0, 0.6, 0.4], [0.0, 0.0, 0.9]]))
    draft = build(log_q, jnp.array([[1, 2, 3], [4, 5, 6]]), 9, 8, "coupled")
    assert draft.proposal == "coupled" and draft.tree.tokens[0] == 9
    got = grown.paths(draft)
    assert list(got) == [(2,), (2, 6), (3,), (3, 6)]
    np.testing.assert_allclose(list(got.values()), [0.6, 0.54, 0.4, 0.36], rtol=1e-5)
