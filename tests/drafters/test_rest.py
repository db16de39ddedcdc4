"""REST's suffix array and drafts against sorting and searching in plain Python."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_jax.drafters.rest import Rest, build_store
from tests.drafters import kit

D = Rest(nodes=9, matches=4, longest=5, k=6)
DOCUMENTS = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=5).filter(any)
TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=kit.SIZE)


@functools.cache
def proposer(d):
    return jax.jit(lambda store, c: d.propose(store, (), c)[0])


def fixed(documents, places=80):
    """A store of so many places: a last document of a token that no text has makes up for what is missing."""
    size = sum(len(d) + 1 for d in documents)
    return build_store([*documents, [11] * (places - size - 1)], D.longest + D.depth)


def joined(documents):
    return [token for document in documents for token in (*document, -1)]


def behind(documents, text, longest):
    """(match length, all that follows the longest end of the text, in order of what follows)."""
    for n in range(min(longest, len(text)), 0, -1):
        found = [
            document[i + n :]
            for document in documents
            for i in range(len(document) - n)
            if document[i : i + n] == text[-n:]
        ]
        if found:
            return n, sorted(found)
    return 0, []


@given(DOCUMENTS, st.sampled_from([1, 2, 3, 5, 8, 100]))
def test_the_order_is_that_of_what_follows(documents, compared):
    store, whole = build_store(documents, compared), joined(documents)
    assert np.asarray(store.tokens).tolist() == whole
    at = np.asarray(store.order).tolist()
    assert sorted(at) == list(range(len(whole)))
    for a, b in zip(at, at[1:], strict=False):
        assert whole[a : a + compared] <= whole[b : b + compared]


@given(DOCUMENTS, st.lists(TEXT, min_size=2, max_size=2))
def test_a_draft_is_what_plain_search_finds(documents, texts):
    draft = jax.device_get(proposer(D)(fixed(documents), kit.context(texts)))
    for row, text in enumerate(texts):
        n, found = behind(documents, text, D.longest)
        if len(found) <= D.matches:
            kit.check_merged(draft, row, [(n, tokens[: D.depth]) for tokens in found], D.nodes)
            continue
        paths = [path for path, _ in kit.paths(draft, row)]
        assert paths and all(any(tuple(f[: len(path)]) == path for f in found) for path in paths)


@pytest.mark.parametrize("counts", [(60, 30, 10), (1, 1, 98), (25, 25, 25, 25), (5, 3), (2, 1)])
def test_of_many_places_continuations_are_taken_as_often_as_they_occur(counts):
    d = Rest(nodes=9, matches=8, longest=3, k=1)
    following = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts)).tolist()
    draft = proposer(d)(fixed([[9, x] for x in following], 310), kit.context([[9]]))
    picked = min(d.matches, len(following))
    got = {path[0]: c * (picked + 5) for path, c in kit.paths(draft)}
    assert sum(got.values()) == pytest.approx(picked, rel=1e-4)
    for token, count in enumerate(counts):
        share = count * picked / len(following)
        assert abs(got.get(token, 0) - share) < (1 if len(following) > d.matches else 1e-3)


def test_no_draft_goes_on_into_another_document_or_past_the_room():
    store = build_store([[1, 2], [3, 4, 5, 6, 7]])
    after = lambda text, room=9: [p for p, _ in kit.paths(D.propose(store, (), kit.context([text], room))[0])]  # noqa: E731
    assert after([1]) == [(2,)]
    assert after([2]) == after([7]) == after([8]) == []
    assert after([2, 3], room=3) == [(4,), (4, 5)]
    draft, _ = D.propose(store, (), kit.context([[3], [3]], active=[True, False]))
    assert draft.tree.valid.sum(-1).tolist() == [5, 1]


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "documents: got 0 tokens"),
        ([[], []], "documents: got 0 tokens"),
        ([[1], [True]], r"documents\[1\]: got bool, takes token ids"),
        ([[1, -1]], "documents: got 2 tokens, 1 of them negative"),
        ([[2**31 - 1]], "documents: got 1 tokens, 0 of them negative, takes ids below"),
    ],
)
def test_documents_that_are_none_are_refused(documents, message):
    with pytest.raises(ValueError, match=message):
        build_store(documents)


def test_settings_that_cannot_work_are_refused():
    for name in ("nodes", "matches", "longest", "k"):
        with pytest.raises(ValueError, match=f"{name}: got 0, takes an integer of at least"):
            Rest(**{name: 0})
    with pytest.raises(ValueError, match="compared: got 0"):
        build_store([[1]], 0)
    with pytest.raises(ValueError, match="drafter_params: got NoneType, takes a Store"):
        D.init(None, 1, 8)
