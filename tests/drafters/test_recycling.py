"""Token Recycling against a table in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_jax.drafters.drafter import Committed
from spec_jax.drafters.recycling import Recycling, top_tokens
from spec_jax.models.target import Output
from spec_jax.tree import Tree
from tests.drafters import kit

RATES = (0.6, 0.2, 0.1)
D = Recycling(kit.WORDS, 8, RATES, 3)
PROPOSE = jax.jit(lambda state, c: D.propose(None, state, c)[0])
OBSERVE = jax.jit(lambda state, committed: D.observe(None, state, committed))


@pytest.mark.parametrize(("vocab", "k"), [(3, 3), (8, 2), (128, 8), (300, 8), (1000, 130)])
def test_top_tokens(vocab, k):
    rng = np.random.default_rng(vocab)
    logits = rng.normal(size=(2, 3, vocab)).astype(np.float32)
    want = np.argsort(-logits, axis=-1)[..., :k]
    np.testing.assert_array_equal(top_tokens(jnp.asarray(logits), k), want)
    tied = np.round(logits)
    ids = np.asarray(top_tokens(jnp.asarray(tied), k))
    assert all(len(set(row)) == k for row in ids.reshape(-1, k).tolist()) and ids.max() < vocab
    values = np.take_along_axis(tied, ids, -1)
    np.testing.assert_array_equal(values, -np.sort(-tied, axis=-1)[..., :k])
    few = np.full((1, 1, vocab), -np.inf, np.float32)
    few[..., vocab - 1] = 0
    assert np.asarray(top_tokens(jnp.asarray(few), k))[0, 0].tolist() == [vocab - 1] + [-1] * (k - 1)


def committed(tokens, parent, valid, taps, path, length):
    """A verdict over trees; what was committed behind the path is not read."""
    b, m = np.shape(path)
    zeros = jnp.zeros((b, m), jnp.int32)
    tree = Tree(jnp.asarray(tokens, jnp.int32), jnp.asarray(parent, jnp.int32), jnp.asarray(valid))
    start = jnp.zeros(b, jnp.int32)
    length, path = jnp.asarray(length, jnp.int32), jnp.asarray(path, jnp.int32)
    return Committed(zeros, start, length, start, path, jnp.asarray(taps, jnp.int32), tree)


def scored(seed, b=3, n=5):
    """A random round: chains with some nodes not verified, of which a prefix was accepted; a row may be finished."""
    rng = np.random.default_rng(seed)
    length = rng.integers(0, n, b)
    return {
        "tokens": rng.integers(0, kit.WORDS, (b, n)),
        "parent": np.broadcast_to(np.arange(-1, n - 1), (b, n)),
        "valid": np.arange(n) < np.maximum(length, rng.integers(1, n + 1, b))[:, None],
        "taps": np.stack([[rng.permutation(kit.WORDS)[:3] for _ in range(n)] for _ in range(b)]),
        "path": np.where(np.arange(4) < length[:, None], np.arange(4), 0),
        "length": length,
    }


@given(st.lists(st.integers(0, 2**16), min_size=1, max_size=4))
def test_the_table_holds_what_was_last_scored(seeds):
    state = D.init(None, 3, kit.SIZE)
    table = np.full((kit.WORDS, 3), -1)
    for seed in seeds:
        r = scored(seed)
        state = OBSERVE(state, committed(**r))
        renewed = {}
        for row, i in np.ndindex(r["tokens"].shape):
            if r["valid"][row, i] and r["length"][row] > 0:
                accepted = i < r["length"][row]
                renewed.setdefault(r["tokens"][row, i], []).append((accepted, r["taps"][row, i].tolist()))
        for token in range(kit.WORDS):
            now = np.asarray(state.successors)[token].tolist()
            seen = renewed.get(token, [(True, table[token].tolist())])
            on_path = [successors for accepted, successors in seen if accepted]
            assert now in (on_path or [successors for _, successors in seen])
        table = np.asarray(state.successors)


@given(st.integers(0, 2**16), st.permutations(range(3)))
def test_the_order_of_rows_plays_no_part(seed, order):
    r = scored(seed)
    r["tokens"] = r["tokens"] % 2
    empty = D.init(None, 3, kit.SIZE)
    shuffled = {name: value[list(order)] for name, value in r.items()}
    a, b = OBSERVE(empty, committed(**r)), OBSERVE(empty, committed(**shuffled))
    np.testing.assert_array_equal(a.successors, b.successors)


@given(st.integers(0, 2**16), st.lists(st.integers(0, kit.WORDS - 1), min_size=2, max_size=2), st.integers(0, 5))
def test_a_draft_is_read_off_the_table(seed, anchors, room):
    table = np.random.default_rng(seed).integers(-1, kit.WORDS, (kit.WORDS, 3))
    draft = PROPOSE(
        D.init(None, 2, 8).replace(successors=jnp.asarray(table)), kit.context([[1, a] for a in anchors], room)
    )
    parents, ranks = D.template.parent, D.template.rank
    for row, anchor in enumerate(anchors):
        path, want = {0: ()}, []
        for i in range(1, D.nodes):
            if parents[i] in path:
                above = path[parents[i]]
                token = table[above[-1] if above else anchor, ranks[i]]
                if token >= 0 and len(above) + 1 < room:
                    path[i] = (*above, token)
                    want.append((path[i], pytest.approx(RATES[ranks[i]])))
        assert kit.paths(draft, row) == want
        assert draft.tree.tokens[row, 0] == anchor
    assert ((draft.tree.tokens >= 0) & (draft.tree.tokens < kit.WORDS)).all()


def test_finished_rows_are_not_drafted_for():
    state = OBSERVE(D.init(None, 2, 8), committed(**scored(0)))
    state = state.replace(successors=jnp.maximum(state.successors, 0))
    draft = PROPOSE(state, kit.context([[1], [1]], active=[True, False]))
    assert draft.tree.valid.sum(-1).tolist() == [8, 1]


def test_prefill_fills_nothing_and_the_table_is_the_batch_s():
    state = OBSERVE(D.init(None, 3, 8), committed(**scored(1)))
    r = committed(**scored(2))
    chunk = Committed(r.tokens, r.start, r.length, r.next_token, r.path)
    other = D.init(None, 1, 8)
    for after in (
        D.observe(None, state, chunk),
        D.insert(state, jnp.array([1]), other),
        D.release(state, jnp.array([1]), jnp.zeros((1, 8), jnp.int32), jnp.array([3])),
    ):
        np.testing.assert_array_equal(after.successors, state.successors)
    assert (state.successors >= 0).any()


def test_taps_are_the_likeliest_tokens_of_every_node():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, kit.WORDS)), jnp.float32)
    np.testing.assert_array_equal(D.tap(Output(logits)), jnp.argsort(-logits, axis=-1)[..., :3])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": 1}, "nodes: got 1"),
        ({"vocab_size": 0}, "vocab_size: got 0"),
        ({"max_depth": 0}, "max_depth: got 0"),
        ({"rates": ()}, "rates: got 0 of them"),
        ({"vocab_size": 7}, "rates: got 8 of them, takes 1 .. vocab_size"),
        ({"rates": (0.1, 0.2)}, "rates: got .* descending"),
        ({"rates": (1.0,)}, "rates: got"),
        ({"rates": (0.5,), "max_depth": 4}, "nodes: got 32, takes at most 5"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Recycling(**{"vocab_size": 100, **settings})
