"""STAND's table of laws and its drafts against dictionaries and sums in plain Python."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_jax import noise
from spec_jax.drafters import law_table
from spec_jax.drafters.drafter import Committed
from spec_jax.drafters.laws import Laws
from spec_jax.drafters.stand import Stand
from spec_jax.models.target import Output
from spec_jax.sampling.settings import Sampling, to_row
from spec_jax.tree import Tree
from tests.drafters import kit

V, K, LONGEST, MOST = kit.WORDS, 3, 2, 3
D = Stand(V, nodes=8, rates=(0.6, 0.2, 0.1), max_depth=3, offered=14, longest=LONGEST, entries=1 << 14, most=MOST)
FIND = jax.jit(jax.vmap(law_table.find, (None, 0)))
RENEW = jax.jit(lambda table, last, laws, rank: law_table.renew(table, last, laws, rank, MOST))
PROPOSE = jax.jit(lambda state, c: D.propose(None, state, c))
OBSERVE = jax.jit(lambda state, committed: D.observe(None, state, committed))
GUMBEL = jax.jit(noise.gumbel)
EVERY = [(a, b) for a in range(V) for b in (-1, *range(V))]


def laws(rng, m):
    """m laws of their K likeliest tokens, which have most of the mass."""
    ids = np.stack([rng.permutation(V)[:K] for _ in range(m)]).astype(np.int32)
    p = -np.sort(-rng.dirichlet(np.ones(K), m), axis=1).astype(np.float32)
    return Laws(jnp.asarray(ids), jnp.log(0.9 * jnp.asarray(p)))


def told(laws, i):
    """The i-th law as a dictionary."""
    ids, p = np.asarray(laws.ids)[i].tolist(), np.exp(np.asarray(laws.log_probs)[i]).tolist()
    return {token: q for token, q in zip(ids, p, strict=True) if token >= 0}


def mean(old, seen, new):
    """The K likeliest of the mean of `seen` laws and one more."""
    whole = {t: (old.get(t, 0) * seen + new.get(t, 0)) / (seen + 1) for t in old | new}
    return dict(sorted(whole.items(), key=lambda x: -x[1])[:K])


def known(rng, rounds=6, m=8):
    """A table after some rounds, and what it should hold: by n-gram, latest token first, a law and of how many."""
    table, want = law_table.empty(D.entries, K), {}
    for _ in range(rounds):
        last = np.array([EVERY[i] for i in rng.choice(len(EVERY), m, replace=False)], np.int32) % 4
        last = np.where(rng.random((m, 1)) < 0.2, [[2, -1]], last)
        found, rank = laws(rng, m), np.where(np.arange(m) == 0, 1, -1)
        table = RENEW(table, jnp.asarray(last), found, jnp.asarray(rank))
        new = told(found, 0)
        for n in range(1, LONGEST + 1):
            gram = tuple(last[0, :n].tolist())
            if min(gram) >= 0:
                law, seen = want.get(gram, ({}, 0))
                want[gram] = (mean(law, seen, new), min(seen + 1, MOST - 1))
    return table, want


def behind(want, last):
    """The law behind the longest known end."""
    for n in range(LONGEST, 0, -1):
        if tuple(last[:n]) in want:
            return want[tuple(last[:n])][0]
    return {}


def test_no_two_ngrams_are_taken_for_one_and_none_reaches_before_the_text():
    at, mark = jax.vmap(lambda x: law_table.places(x, 1 << 14))(jnp.array(EVERY))
    grams = {tuple(gram[:n]): (int(at[i, n - 1]), int(mark[i, n - 1])) for i, gram in enumerate(EVERY) for n in (1, 2)}
    whole = [place for gram, place in grams.items() if min(gram) >= 0]
    assert len(set(whole)) == len(whole) == V + V * V
    assert all((mark > 0) == (min(gram) >= 0) for gram, (_, mark) in grams.items())
    assert max(place for place, _ in whole) < 1 << 14


@given(st.integers(0, 2**16))
def test_the_table_holds_the_mean_of_what_was_seen_behind_every_ngram(seed):
    table, want = known(np.random.default_rng(seed), rounds=10)
    found = FIND(table, jnp.array(EVERY))
    for i, last in enumerate(EVERY):
        assert told(found, i) == pytest.approx(behind(want, last), rel=1e-4)


@given(st.integers(0, 2**16), st.permutations(range(6)))
def test_the_order_of_laws_plays_no_part_and_accepted_nodes_come_first(seed, order):
    rng = np.random.default_rng(seed)
    last = jnp.asarray(rng.integers(0, 2, (6, LONGEST)), jnp.int32)
    found, rank = laws(rng, 6), jnp.asarray(rng.integers(-1, 2, 6), jnp.int32)
    empty, at = law_table.empty(D.entries, K), jnp.array(order)
    table = RENEW(empty, last, found, rank)
    jax.tree.map(
        np.testing.assert_array_equal, table, RENEW(empty, *jax.tree.map(lambda x: x[at], (last, found, rank)))
    )
    for token in range(2):
        here = [i for i in range(6) if last[i, 0] == token and rank[i] == rank[last[:, 0] == token].max() >= 0]
        got = told(FIND(table, jnp.array([[token, -1]])), 0)
        taken = [pytest.approx(told(found, i), rel=1e-5) for i in here] or [{}]
        assert any(got == law for law in taken)


def context(texts, temperature, room=kit.SIZE, **other):
    c = kit.context(texts, room, **other)
    rows = [to_row(Sampling(temperature=temperature), V)] * len(texts)
    keys = jnp.stack([noise.request_key(r) for r in range(len(texts))])
    return dataclasses.replace(c, sampling=jax.tree.map(lambda *x: jnp.stack(x), *rows), key=keys)


def candidates(want, text, key, temperature, room):
    """Path and chance of every node of the tree of candidates."""
    path, chance = {0: ()}, {(): 1.0}
    for i in range(1, D.template.nodes):
        above = path.get(D.template.parent[i])
        if above is None or len(above) + 1 >= room:
            continue
        whole = [*text, *above]
        law = behind(want, (whole[-1], whole[-2] if len(whole) > 1 else -1))
        noisy = temperature * np.asarray(GUMBEL(key, jnp.int32(len(whole)), jnp.arange(V)))
        score = {t: np.log(p) + noisy[t] for t, p in law.items()}
        ranked, mass = sorted(score, key=lambda t: -score[t]), sum(np.exp(s) for s in score.values())
        if D.template.rank[i] < len(ranked):
            token = ranked[D.template.rank[i]]
            path[i] = (*above, token)
            chance[path[i]] = chance[above] * np.exp(score[token]) / mass
    return {p: c for p, c in chance.items() if p}


@given(st.integers(0, 2**16), st.sampled_from([0.0, 1.0]), st.integers(1, 6))
def test_a_draft_is_the_likeliest_part_of_the_tree_of_candidates(seed, temperature, room):
    rng = np.random.default_rng(seed)
    table, want = known(rng, rounds=12)
    state = dataclasses.replace(D.init(None, 2, kit.SIZE), table=table)
    texts = [rng.integers(0, 4, n).tolist() for n in (1, 5)]
    c = context(texts, temperature, room)
    draft, _ = jax.device_get(PROPOSE(state, c))
    for row, text in enumerate(texts):
        chance = candidates(want, text, c.key[row], temperature, room)
        got = dict(zip([path for path, _ in kit.paths(draft, row)], kit.chances(draft, row), strict=True))
        assert set(got) <= set(chance) and draft.tree.tokens[row, 0] == text[-1]
        assert list(got.values()) == pytest.approx(sorted(chance.values(), reverse=True)[: D.nodes - 1], rel=1e-3)
        assert all(got[path] == pytest.approx(chance[path], rel=1e-3) for path in got)


def test_every_scored_node_renews_the_law_behind_its_path():
    zeros = jnp.zeros((2, 2), jnp.int32)
    chunk = Committed(jnp.array([[9, 9], [6, 9]]), zeros[:, 0], jnp.array([0, 1]), zeros[:, 0], zeros)
    state = OBSERVE(D.init(None, 2, kit.SIZE), chunk)
    assert state.before.tolist() == [[-1], [6]] and (state.table.mark == 0).all()
    tree = Tree(
        tokens=jnp.array([[5, 1, 2, 3], [7, 8, 9, 10]]),
        parent=jnp.array([[-1, 0, 0, 2], [-1, 0, 1, 2]]),
        valid=jnp.array([[True] * 4, [True, True, False, False]]),
    )
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, V)), jnp.float32)
    committed = Committed(
        tree.tokens[:, :2], zeros[:, 0], jnp.array([1, 2]), zeros[:, 0], zeros, D.tap(Output(logits)), tree
    )
    after = OBSERVE(state, committed)
    table = after.table
    assert after.before.tolist() == [[5], [8]]
    law = np.asarray(jax.nn.log_softmax(logits))
    places = {(5, -1): (0, 0), (1, 5): (0, 1), (2, 5): (0, 2), (3, 2): (0, 3), (7, 6): (1, 0), (8, 7): (1, 1)}
    found = FIND(table, jnp.array(list(places)))
    for i, place in enumerate(places.values()):
        top = np.argsort(-law[place])[:K]
        assert found.ids[i].tolist() == top.tolist()
        np.testing.assert_allclose(found.log_probs[i], law[place][top], rtol=1e-5)
    assert (FIND(table, jnp.array([[9, 8], [10, 9], [4, 4]])).ids == -1).all()
    finished = dataclasses.replace(committed, length=zeros[:, 0])
    jax.tree.map(np.testing.assert_array_equal, OBSERVE(after, finished), after)


def test_the_table_is_the_batch_s_and_a_row_s_end_is_its_own():
    table, _ = known(np.random.default_rng(1), rounds=20)
    state = dataclasses.replace(D.init(None, 3, 8), table=table, before=jnp.array([[0], [1], [2]]))
    released = D.release(state, jnp.array([1, 3]), jnp.zeros((2, 8), jnp.int32), jnp.array([3, 0]))
    assert released.before.tolist() == [[0], [-1], [2]]
    inserted = D.insert(state, jnp.array([2]), dataclasses.replace(D.init(None, 1, 8), before=jnp.array([[8]])))
    assert inserted.before.tolist() == [[0], [1], [8]]
    for after in (released, inserted):
        jax.tree.map(np.testing.assert_array_equal, after.table, table)
    draft, _ = PROPOSE(
        dataclasses.replace(D.init(None, 2, 8), table=table), context([[2], [2]], 0.0, active=[True, False])
    )
    assert draft.tree.valid[0].sum() > 1 and draft.tree.valid[1].sum() == 1 and draft.proposal == "coupled"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 0}, "vocab_size: got 0"),
        ({"nodes": 1}, "nodes: got 1"),
        ({"offered": 16}, "offered: got 16, takes an integer of at least 32"),
        ({"longest": 0}, "longest: got 0"),
        ({"entries": 0}, "entries: got 0"),
        ({"most": 0}, "most: got 0"),
        ({"rates": ()}, "rates: got 0 of them"),
        ({"rates": (0.1, 0.2)}, "rates: got .* descending"),
        ({"rates": (0.5,)}, "nodes: got 32, takes at most 7"),
        ({"b": -1.0}, "b: got -1.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Stand(**{"vocab_size": 100, **settings})
