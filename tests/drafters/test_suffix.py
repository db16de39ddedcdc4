"""Suffix drafts against a search, a trie and a ring in plain Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_jax.drafters.suffix import Suffix
from tests.drafters import kit

NODES, LONGEST, STORE, PENALTY = 9, 6, 20, 1
TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=kit.SIZE)
OUTPUTS = st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=kit.SIZE - 1), max_size=6)


def drafter(candidates=3, store=STORE, nodes=NODES):
    return Suffix(nodes, candidates, LONGEST, store, PENALTY)


@functools.cache
def proposer(d):
    return jax.jit(lambda state, c: d.propose(None, state, c))


@functools.cache
def releaser(d):
    return jax.jit(d.release)


def serve(d, state, output, row=0, batch=1, prompt=(2,)):
    """The state after a row has emitted an output and was released."""
    texts = [[*prompt, *output]] * batch
    c = kit.context(texts, prompt_length=len(prompt))
    _, state = proposer(d)(state, c)
    return releaser(d)(state, jnp.array([row]), c.tokens[:1], c.length[:1])


class Ring:
    """The store: slots, each None or (text number, place in it)."""

    def __init__(self, size=STORE):
        self.size, self.head, self.slots, self.texts = size, 0, [None] * size, []

    def add(self, text):
        if text:
            number, kept = len(self.texts), text[-(self.size - 1) :]
            self.texts.append(kept)
            for entry in [*[(number, i) for i in range(len(kept))], None]:
                self.slots[self.head] = entry
                self.head = (self.head + 1) % self.size

    def places(self):
        """(slot, tokens before and with it, tokens behind it) of every stored token; lost tokens are left out."""
        kept = {entry for entry in self.slots if entry}
        for slot, entry in enumerate(self.slots):
            if entry:
                number, i = entry
                start = min(j for n, j in kept if n == number)
                yield slot, self.texts[number][start : i + 1], self.texts[number][i + 1 :]


def matched(before, text):
    n = 0
    while n < min(len(before), len(text), LONGEST) and before[-1 - n] == text[-1 - n]:
        n += 1
    return n


def candidates(text, ring, count, depth):
    """(match length, continuation), best first."""
    found = []
    for i in range(len(text) - 1):
        known = list(text)
        for j in range(depth):
            known.append(known[i + 1 + j])
        found.append((matched(text[: i + 1], text), 1, i, known[len(text) :]))
    for slot, before, behind in ring.places():
        if behind:
            found.append((matched(before, text) - PENALTY, 0, slot, behind[:depth]))
    found = sorted((f for f in found if f[0] > 0), key=lambda f: f[:3], reverse=True)
    return [(f[0], f[3]) for f in found[:count]]


@given(OUTPUTS, st.lists(TEXT, min_size=2, max_size=2), st.sampled_from([1, 3]))
def test_a_draft_is_what_plain_search_finds(outputs, texts, count):
    d, ring = drafter(count), Ring()
    state = d.init(None, 2, kit.SIZE)
    for output in outputs:
        state = serve(d, state, output, batch=2)
        ring.add(output)
    draft, _ = proposer(d)(state, kit.context(texts))
    for row, text in enumerate(texts):
        kit.check_merged(jax.device_get(draft), row, candidates(text, ring, count, d.depth), NODES)


@given(st.lists(TEXT, min_size=1, max_size=12), TEXT)
def test_every_draft_continues_one_earlier_text(outputs, text):
    """However often the ring went round: a path from the store stands, with the match before it, within one output."""
    d, outputs = drafter(), [o[: kit.SIZE - 1] for o in outputs]
    state = d.init(None, 1, kit.SIZE)
    for output in outputs:
        state = serve(d, state, output)
    draft, _ = proposer(d)(state, kit.context([text]))
    for path, _ in kit.paths(draft):
        path = list(path)
        stored = any(
            o[i : i + len(path)] == path and o[i - 1] == text[-1]
            for o in outputs
            for i in range(1, len(o) - len(path) + 1)
        )
        own = any(text[i - 1] == text[-1] and (text + path)[i : i + len(path)] == path for i in range(1, len(text)))
        assert stored or own


def test_the_end_of_one_output_and_the_start_of_the_next_are_no_match():
    d = drafter()
    state = d.init(None, 1, kit.SIZE)
    for output in ([1, 2, 3], [4, 5, 6]):
        state = serve(d, state, output)
    after = lambda text: [path for path, _ in kit.paths(proposer(d)(state, kit.context([text]))[0])]  # noqa: E731
    assert after([7, 2, 3]) == []
    assert after([4, 5]) == [(6,)]
    assert after([7, 5]) == []  # one token, less the penalty
    assert after([1, 2]) == [(3,)]


def test_the_store_is_a_ring():
    d = drafter()
    state = d.init(None, 1, kit.SIZE)
    for i in range(7):
        state = serve(d, state, [i, i + 1, i + 2, i])
        assert state.store.shape == (STORE,)
    stored = np.asarray(state.store)
    assert sorted(set(stored.tolist())) == [-1, *range(3, 9)]
    long = serve(d, d.init(None, 1, kit.SIZE), list(np.arange(kit.SIZE - 1) % 11))
    assert np.asarray(long.store).tolist() == [*(np.arange(kit.SIZE - 1) % 11)[-(STORE - 1) :], -1]


def test_only_outputs_are_stored_and_rows_out_of_range_are_left_out():
    d = drafter()
    empty = d.init(None, 3, kit.SIZE)
    state = serve(d, empty, [3, 4], row=1, batch=3, prompt=(1, 2, 1, 2))
    assert np.asarray(state.store)[:3].tolist() == [3, 4, -1] and int(state.head) == 3
    out = serve(d, empty, [3, 4], row=3, batch=3)
    assert (np.asarray(out.store) == -1).all() and int(out.head) == 0
    never_ran = releaser(d)(empty, jnp.array([0]), jnp.ones((1, kit.SIZE), jnp.int32), jnp.array([5]))
    assert (np.asarray(never_ran.store) == -1).all()
    again = releaser(d)(state, jnp.array([1]), jnp.ones((1, kit.SIZE), jnp.int32), jnp.array([6]))
    assert int(again.head) == 3


def test_several_rows_are_released_at_once():
    d = drafter()
    c = kit.context([[1, 3, 4], [1, 5], [1, 6, 7, 8]])
    _, state = proposer(d)(d.init(None, 3, kit.SIZE), c)
    rows = jnp.array([2, 3, 0])
    state = releaser(d)(state, rows, c.tokens[jnp.array([2, 0, 0])], c.length[jnp.array([2, 0, 0])])
    assert np.asarray(state.store)[:7].tolist() == [6, 7, 8, -1, 3, 4, -1]


def test_insert_moves_what_belongs_to_the_row():
    d = drafter()
    one, big = d.init(None, 1, kit.SIZE), serve(d, d.init(None, 3, kit.SIZE), [9, 9], batch=3)
    _, one = proposer(d)(one, kit.context([[1, 2, 3, 4]], prompt_length=3))
    big = d.insert(big, jnp.array([2]), one)
    assert np.asarray(big.store)[:3].tolist() == [9, 9, -1]
    text = kit.context([[1, 2, 3, 4, 5]]).tokens
    big = releaser(d)(big, jnp.array([2]), text, jnp.array([5]))
    assert np.asarray(big.store)[3:6].tolist() == [4, 5, -1]


@given(OUTPUTS, TEXT, st.permutations(range(3)), st.integers(0, 9))
def test_a_row_is_drafted_for_alike_in_every_slot(outputs, text, order, room):
    d = drafter()
    alone, batch = d.init(None, 1, kit.SIZE), d.init(None, 3, kit.SIZE)
    for output in outputs:
        alone, batch = serve(d, alone, output), serve(d, batch, output, batch=3)
    others = [[1, 2, 1, 2], text, [0]]
    want, _ = proposer(d)(alone, kit.context([text], room=room))
    got, _ = proposer(d)(batch, kit.context([others[i] for i in order], room=[[9, room, 3][i] for i in order]))
    slot = order.index(1)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b[slot]), want, got)
    assert all(len(path) < room for path, _ in kit.paths(want))


def test_finished_rows_are_not_drafted_for():
    d = drafter()
    draft, state = proposer(d)(d.init(None, 2, kit.SIZE), kit.context([[1, 1, 1]] * 2, active=[True, False]))
    assert draft.tree.valid.sum(-1).tolist() == [NODES, 1]
    assert state.begin[1] > kit.SIZE


def test_without_a_store():
    d = drafter(store=0)
    state = serve(d, d.init(None, 1, kit.SIZE), [3, 4, 5])
    draft, _ = proposer(d)(state, kit.context([[3, 4]]))
    assert kit.paths(draft) == []
    kit.check_merged(
        proposer(d)(state, kit.context([[3, 4, 3]]))[0], 0, candidates([3, 4, 3], Ring(), 3, d.depth), NODES
    )


def test_the_longer_match_wins_then_the_own_text_then_the_later():
    d = drafter(candidates=1)
    state = serve(d, d.init(None, 1, kit.SIZE), [1, 2, 3, 4, 9])
    first = lambda text: kit.paths(proposer(d)(state, kit.context([text]))[0])[0][0][0]  # noqa: E731
    assert first([3, 4, 8, 0, 1, 2, 3, 4]) == 9
    assert first([2, 3, 4, 8, 0, 1, 2, 3, 4]) == 8
    assert first([4, 8, 4, 7, 4]) == 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": 1}, "nodes: got 1"),
        ({"candidates": 0}, "candidates: got 0"),
        ({"longest": 0}, "longest: got 0"),
        ({"store": -1}, "store: got -1"),
        ({"store": 32}, "store: got 32, takes 0 or more than longest"),
        ({"longest": 2}, "store_penalty: got 2, takes less than longest"),
        ({"candidates": True}, "candidates: got True"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Suffix(**settings)
