"""The throughput budget against sums and counts in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_jax.control.throughput import Calibration, Throughput
from spec_jax.tree import Draft, Tree
from spec_jax.verify.verdict import Verdict

N, WORDS = 8, 4
WIDTHS = (1, 3, 5, 8)
COST = jnp.array([1.0, 1.4, 1.6, 2.2])
T = Throughput()
DECIDE = jax.jit(lambda state, draft, active, cost: T.decide(state, draft, active, cost, WIDTHS))
OBSERVE = jax.jit(T.observe)


def drafts(seed, b=2):
    """Random trees; a node is valid only if its parent is."""
    rng = np.random.default_rng(seed)
    parent = np.stack([[-1, *(rng.integers(max(0, i - 3), i) for i in range(1, N))] for _ in range(b)])
    valid = rng.random((b, N)) < 0.85
    valid[:, 0] = True
    for row, i in np.ndindex(b, N):
        valid[row, i] &= i == 0 or valid[row, parent[row, i]]
    confidence = rng.uniform(0.02, 0.99, (b, N))
    confidence[:, 0] = 1
    tokens = rng.integers(0, WORDS, (b, N))
    return draft_of(tokens, parent, valid, confidence)


def draft_of(tokens, parent, valid, confidence):
    tree = Tree(jnp.asarray(tokens, jnp.int32), jnp.asarray(parent, jnp.int32), jnp.asarray(valid))
    return Draft(tree, jnp.asarray(confidence, jnp.float32))


def chain_of(tokens, confidence):
    n = len(tokens)
    return draft_of([tokens], [list(range(-1, n - 1))], [[True] * n], [[1.0] + [confidence] * (n - 1)])


def verdict_of(path, tokens):
    """One row: the accepted nodes (the root first) and the emitted tokens, as many."""
    pad = lambda x: jnp.asarray([[*x, *[0] * (N - len(x))]], jnp.int32)  # noqa: E731
    return Verdict(pad(path), pad(tokens), pad([]), jnp.array([len(path) - 1]), None, None)


def judge(draft, texts, width):
    """The verdict of a target that says `texts`, on the first `width` nodes of every row."""
    rows = []
    for row, text in enumerate(texts):
        path, node = [0], 0
        while True:
            says = text[len(path) - 1]
            below = (draft.tree.parent[row] == node) & draft.tree.valid[row] & (draft.tree.tokens[row] == says)
            children = [i for i in range(1, width) if below[i]]
            if not children:
                break
            node = children[0]
            path.append(node)
        rows.append(verdict_of(path, text[: len(path)]))
    return jax.tree.map(lambda *x: jnp.concatenate(x), *rows)


def rates(draft, p, active):
    """Expected tokens per unit of cost of every width, if a node is accepted with chance p behind an accepted one."""
    tokens = np.zeros(len(WIDTHS))
    for row in np.flatnonzero(active):
        chance = [1.0]
        for i in range(1, N):
            chance.append(chance[draft.tree.parent[row, i]] * p[row, i] * bool(draft.tree.valid[row, i]))
        tokens += [sum(chance[:w]) for w in WIDTHS]
    return tokens / np.asarray(COST)


@given(st.integers(0, 2**16), st.lists(st.booleans(), min_size=2, max_size=2), st.booleans())
def test_the_width_with_the_most_expected_tokens_for_its_cost(seed, active, fresh):
    draft, rng = drafts(seed), np.random.default_rng(seed)
    accepted = np.zeros(T.bins) if fresh else rng.uniform(0, 30, T.bins)
    state = Calibration(jnp.asarray(accepted + (0 if fresh else rng.uniform(0, 30, T.bins))), jnp.asarray(accepted))
    state = jax.tree.map(lambda x: x.astype(jnp.float32), state)
    rate = rates(draft, np.asarray(T.calibrated(state, draft.confidence)), active)
    chosen = int(DECIDE(state, draft, jnp.asarray(active), COST))
    assert rate[chosen] >= rate.max() * (1 - 1e-4)
    if not any(active):
        assert chosen == 0


def test_without_a_live_node_a_plain_step():
    draft = draft_of([[1, 2, 3]], [[-1, 0, 1]], [[True, False, False]], [[1.0, 0.99, 0.99]])
    assert T.decide(T.init(1), draft, jnp.array([True]), jnp.array([1.0, 1.0]), (1, 3)) == 0


@pytest.mark.parametrize("chosen", range(4))
def test_a_cost_vector_can_force_any_width(chosen):
    forced = jnp.full(len(WIDTHS), 1e9).at[chosen].set(1.0)
    assert DECIDE(T.init(2), drafts(chosen), jnp.ones(2, bool), forced) == chosen


@given(st.integers(0, 2**16), st.sampled_from(WIDTHS), st.lists(st.booleans(), min_size=2, max_size=2))
def test_what_a_round_teaches(seed, width, active):
    draft = drafts(seed)
    texts = np.random.default_rng(seed + 1).integers(0, WORDS, (2, N)).tolist()
    verdict = judge(draft, texts, width)
    seen, accepted = np.zeros(T.bins), np.zeros(T.bins)
    bins = np.asarray(T._bin(draft.confidence))
    for row in np.flatnonzero(active):
        path = np.asarray(verdict.path)[row, : int(verdict.accepted[row]) + 1].tolist()
        for i in range(1, N):
            if draft.tree.valid[row, i] and draft.tree.parent[row, i] in path:
                step = path.index(draft.tree.parent[row, i])
                seen[bins[row, i]] += 1
                accepted[bins[row, i]] += i in path if i < width else draft.tree.tokens[row, i] == texts[row][step]
    before = Calibration(jnp.arange(T.bins) * 1.0, jnp.ones(T.bins))
    after = OBSERVE(before, draft, jnp.int32(width), verdict, jnp.asarray(active))
    np.testing.assert_allclose(after.seen, np.arange(T.bins) * T.decay + seen, rtol=1e-5)
    np.testing.assert_allclose(after.accepted, T.decay + accepted, rtol=1e-5)


def rounds(state, says, count, confidence=0.9):
    """Rounds on a chain that drafts token 1 while the target says `says`; the last width."""
    draft = chain_of([0] + [1] * (N - 1), confidence)
    chosen = None
    for _ in range(count):
        chosen = int(DECIDE(state, draft, jnp.array([True]), COST))
        state = OBSERVE(
            state, draft, jnp.int32(WIDTHS[chosen]), judge(draft, [[says] * N], WIDTHS[chosen]), jnp.array([True])
        )
    return state, chosen


def test_a_drafter_that_is_wrong_is_given_up_on_and_taken_up_again_once_right():
    state, chosen = rounds(T.init(1), 1, 1)
    assert WIDTHS[chosen] == N
    state, chosen = rounds(state, 2, 60)
    assert WIDTHS[chosen] == 1
    state, chosen = rounds(state, 1, 120)
    assert WIDTHS[chosen] == N


def test_the_drafter_s_own_estimate_is_where_it_starts():
    p = jnp.linspace(0.01, 0.99, 30)
    np.testing.assert_allclose(T.calibrated(T.init(1), p), p, rtol=1e-5)


def test_bins_are_in_the_order_of_confidence():
    bins = np.asarray(T._bin(jnp.linspace(0.0, 1.0, 500)))
    assert bins[0] == 0 and bins[-1] == T.bins - 1 and (np.diff(bins) >= 0).all() and len(set(bins.tolist())) == T.bins


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prior": 0.0}, "prior: got 0.0"),
        ({"decay": 0.0}, "decay: got 0.0"),
        ({"decay": 1.5}, "decay: got 1.5"),
        ({"bins": 0}, "bins: got 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Throughput(**settings)
