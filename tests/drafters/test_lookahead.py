"""Lookahead decoding round by round against windows and a pool in plain Python."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_jax import noise
from spec_jax.drafters import ngram_ring
from spec_jax.drafters.cascade import Cascade
from spec_jax.drafters.combined import Combined
from spec_jax.drafters.drafter import Committed
from spec_jax.drafters.lookahead import Lookahead
from spec_jax.drafters.ngram import NGram
from spec_jax.drafters.ngram_ring import NGrams
from spec_jax.models.target import Output
from spec_jax.models.toy import TableTarget
from spec_jax.sampling.settings import Sampling, to_row
from spec_jax.tree import Tree
from tests.drafters import kit

W, N, G, P, V = 4, 4, 3, 10, kit.WORDS
D = Lookahead(W, N, G, P, candidates=V)
SIZE, LIMIT = 40, 36
PROPOSE = jax.jit(lambda state, c: D.propose(None, state, c))
TAP = jax.jit(lambda logits: D.tap(Output(logits)))
OBSERVE = jax.jit(lambda state, committed: D.observe(None, state, committed))
GUMBEL = jax.jit(noise.gumbel)


class Row:
    """One row: a target that looks at two tokens, its text, and the drafter's window and pool."""

    def __init__(self, seed, prompt, key, temperature):
        self.table = np.random.default_rng(seed).normal(0, 2, (V, V, V)).astype(np.float32)
        self.text, self.key, self.temperature = list(prompt), key, np.float32(temperature)
        self.window, self.pool = [], [None] * P
        self.head = 0

    def logits(self, path):
        two = (self.text + list(path))[-2:]
        return self.table[two[0] if len(two) > 1 else 0, two[-1]]

    def choice(self, path):
        noisy = GUMBEL(self.key, jnp.int32(len(self.text) + len(path)), jnp.arange(V))
        return int(np.argmax(self.logits(path) + self.temperature * np.asarray(noisy)))

    def begin(self):
        if not self.window:
            at = [(i * 2654435769 % 2**32) % len(self.text) for i in range(1, W + 1)]
            self.window = [[self.text[i] for i in at]]

    def branches(self):
        """Below the anchor, every place's path: the chain to it, and its later levels."""
        chain = self.window[0][1:]
        return [(*chain[:i], *(level[i] for level in self.window[1:])) for i in range(W)]

    def guesses(self):
        latest = [self.pool[(self.head - 1 - age) % P] for age in range(P)]
        return [g[1:] for g in latest if g and g[0] == self.text[-1]][:G]

    def drafted(self, room):
        paths = {path[:n] for path in [*self.branches(), *self.guesses()] for n in range(1, len(path) + 1)}
        return {path for path in paths if len(path) < room}

    def commit(self, verified, emitted):
        """After a verdict, before the text moves on; `verified` are the paths that were scored."""
        branches, chain = self.branches(), [self.text[-1], *self.window[0][1:]]
        known = [not path or path in verified for path in branches]
        if not any(known):
            return
        last = self.window[-1]
        new = [self.choice(path) if k else old for path, k, old in zip(branches, known, last, strict=True)]
        full, moved = len(self.window) == N - 1, len(emitted)
        if full:
            grams = [(chain[i], *(level[i] for level in self.window[1:]), new[i]) for i in range(W) if known[i]]
            self.add([g for i, g in enumerate(grams) if g not in grams[i + 1 :]])
            self.window, moved = self.window[1:], moved - 1
        self.window = [[level[(i + moved) % W] for i in range(W)] for level in [*self.window, new]]

    def add(self, grams):
        self.pool = [None if g in grams else g for g in self.pool]
        for g in grams:
            self.pool[self.head] = g
            self.head = (self.head + 1) % P


def context(rows):
    c = kit.context([row.text for row in rows], [LIMIT - len(row.text) for row in rows], size=SIZE)
    each = [to_row(Sampling(temperature=float(row.temperature)), V) for row in rows]
    sampling = jax.tree.map(lambda *x: jnp.stack(x), *each)
    return dataclasses.replace(c, key=jnp.stack([row.key for row in rows]), sampling=sampling)


def nodes_of(draft, row):
    """Every valid node's path, by index."""
    tree, found = draft.tree, {0: ()}
    for i in range(1, D.nodes):
        if tree.valid[row, i]:
            found[i] = (*found[int(tree.parent[row, i])], int(tree.tokens[row, i]))
    return found


def verdict(rows, draft, rng):
    """The walk of every row, cut short at random, over the draft's first nodes; and what was scored."""
    width = D.nodes if rng.random() < 0.8 else int(rng.integers(1, D.nodes))
    logits = np.zeros((len(rows), D.nodes, V), np.float32)
    m, verified, emitted = D.depth + 1, [], []
    path, tokens = np.zeros((len(rows), m), np.int32), np.zeros((len(rows), m), np.int32)
    for r, row in enumerate(rows):
        paths = {i: p for i, p in nodes_of(draft, r).items() if i < width}
        index = {p: i for i, p in paths.items()}
        for i, p in paths.items():
            logits[r, i] = row.logits(p)
        walk = [()]
        while (*walk[-1], row.choice(walk[-1])) in index:
            walk.append((*walk[-1], row.choice(walk[-1])))
        new = [*walk[-1], row.choice(walk[-1])]
        kept = len(new) if rng.random() < 0.7 else int(rng.integers(1, len(new) + 1))
        path[r, : len(walk)] = [index[p] for p in walk]
        tokens[r, :kept] = [row.text[-1], *new][:kept]
        verified.append(set(index))
        emitted.append(new[:kept])
    lengths = jnp.asarray([len(e) for e in emitted], jnp.int32)
    valid = draft.tree.valid & (np.arange(D.nodes) < width)
    committed = Committed(
        tokens=jnp.asarray(tokens),
        start=jnp.asarray([len(row.text) - 1 for row in rows], jnp.int32),
        length=lengths,
        next_token=jnp.asarray([e[-1] for e in emitted], jnp.int32),
        path=jnp.asarray(path),
        taps=TAP(jnp.asarray(logits)),
        tree=Tree(*(jnp.asarray(x) for x in (draft.tree.tokens, draft.tree.parent, valid))),
    )
    return verified, emitted, committed


@given(st.integers(0, 2**16))
@settings(max_examples=12)
def test_windows_and_pool_round_by_round(seed):
    rng = np.random.default_rng(seed)
    rows = [
        Row(seed + r, rng.integers(0, V, 1 + r * 5), noise.request_key(seed + r), temperature)
        for r, temperature in enumerate((0.0, 0.8))
    ]
    state = D.init(None, 2, SIZE)
    while all(len(row.text) < LIMIT - D.depth - 1 for row in rows):
        draft, state = jax.device_get(PROPOSE(state, context(rows)))
        for r, row in enumerate(rows):
            row.begin()
            paths = [path for path, _ in kit.paths(draft, r)]
            assert len(paths) == len(set(paths)) and set(paths) == row.drafted(LIMIT - len(row.text))
            assert draft.tree.tokens[r, 0] == row.text[-1]
        verified, emitted, committed = verdict(rows, draft, rng)
        state = jax.device_get(OBSERVE(state, committed))
        for r, row in enumerate(rows):
            row.commit(verified[r], emitted[r])
            row.text += emitted[r]
            assert state.filled[r] == len(row.window)
            got = state.window[r, : state.filled[r]]
            assert got[:, 1:].tolist() == [level[1:] for level in row.window]
            assert got[1:].tolist() == row.window[1:]
            slots = [None if slot[0] < 0 else tuple(slot) for slot in state.ngrams.tokens[r].tolist()]
            assert slots == row.pool and state.ngrams.head[r] == row.head


def begun(rows=3):
    """A state in which every row has drafted."""
    texts = [[1 + r, 2, 3] for r in range(rows)]
    return texts, D.propose(None, D.init(None, rows, SIZE), kit.context(texts))[1]


def test_rows_come_and_go():
    texts, state = begun()
    fresh = D.init(None, 1, SIZE)
    gone = D.release(state, jnp.array([1, 3]), jnp.zeros((2, SIZE), jnp.int32), jnp.array([3, 0]))
    put = D.insert(gone, jnp.array([1]), jax.tree.map(lambda x: x[2:], state))
    for name in ("window", "filled", "node", "key", "temperature"):
        for row, want in ((0, state), (2, state)):
            np.testing.assert_array_equal(getattr(gone, name)[row], getattr(want, name)[row])
        np.testing.assert_array_equal(getattr(gone, name)[1], getattr(fresh, name)[0])
        np.testing.assert_array_equal(getattr(put, name)[1], getattr(state, name)[2])
    assert texts and state.filled.tolist() == [1, 1, 1] and gone.filled.tolist() == [1, 0, 1]


def test_finished_rows_are_not_drafted_for_and_begin_no_window():
    draft, state = D.propose(None, D.init(None, 2, SIZE), kit.context([[1, 2], [1, 2]], active=[True, False]))
    assert draft.tree.valid[0].sum() > 1 and draft.tree.valid[1].sum() == 1
    assert state.filled.tolist() == [1, 0]


def test_prefill_and_a_round_without_a_token_move_nothing():
    _, state = begun(1)
    zeros = jnp.zeros((1, D.depth + 1), jnp.int32)
    chunk = Committed(zeros, zeros[:, 0], zeros[:, 0] + 3, zeros[:, 0], zeros)
    draft, _ = D.propose(None, state, kit.context([[1, 2, 3]]))
    taps = TAP(jnp.zeros((1, D.nodes, V)))
    still = dataclasses.replace(chunk, length=zeros[:, 0], tree=draft.tree, taps=taps)
    for committed in (chunk, still):
        jax.tree.map(np.testing.assert_array_equal, D.observe(None, state, committed), state)


def test_an_ngram_is_kept_once_and_the_latest_is_found_first():
    empty = jax.tree.map(lambda x: x[0], ngram_ring.empty(1, 4, 2))
    assert isinstance(empty, NGrams)
    add = lambda ring, *grams: ngram_ring.add(ring, jnp.array(grams), jnp.ones(len(grams), bool))  # noqa: E731
    ring = add(empty, (1, 2), (1, 3), (1, 2))
    find = lambda ring, token: np.asarray(ngram_ring.starting_with(ring, jnp.int32(token), 3)).tolist()  # noqa: E731
    assert find(ring, 1) == [[1, 2], [1, 3], [-1, -1]]
    ring = add(ring, (1, 3), (2, 2))
    assert find(ring, 1) == [[1, 3], [1, 2], [-1, -1]] and find(ring, 2) == [[2, 2], [-1, -1], [-1, -1]]
    ring = add(ring, (5, 5), (5, 6), (5, 7))
    assert find(ring, 1) == [[-1, -1]] * 3 and find(ring, 5) == [[5, 7], [5, 6], [5, 5]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 0}, "window: got 0"),
        ({"ngram": 2}, "ngram: got 2, takes an integer of at least 3"),
        ({"guesses": 0}, "guesses: got 0"),
        ({"candidates": 0}, "candidates: got 0"),
        ({"window": 20, "pool": 8}, "pool: got 8, takes at least window and guesses, which is 20"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Lookahead(**settings)


def test_drafters_that_give_it_other_drafts_refuse_it():
    with pytest.raises(ValueError, match="drafter: got a Lookahead, takes one that keeps no state of its drafts"):
        Combined(D)
    with pytest.raises(ValueError, match="retrieval: got a Lookahead"):
        Combined(NGram(), D)
    with pytest.raises(ValueError, match="inner: got a Lookahead"):
        Cascade(TableTarget(V), D, 4)
