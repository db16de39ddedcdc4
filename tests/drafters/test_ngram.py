"""Prompt lookup against a search in plain Python (every short text is in tests/faults/test_d21_ngram.py)."""

import functools

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_jax.drafters.ngram import NGram
from tests.drafters import kit

TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=kit.SIZE)


@functools.cache
def proposer(k, n_max, n_min):
    return jax.jit(lambda c: NGram(k, n_max, n_min).propose(None, (), c)[0])


def lookup(text, k, n_max, n_min):
    for n in range(n_max, n_min - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[len(text) - n :]:
                known = list(text)
                for i in range(k):
                    known.append(known[end + i])
                return n, known[len(text) :]
    return 0, []


@given(st.lists(TEXT, min_size=3, max_size=3), st.sampled_from([(7, 3, 2), (4, 5, 1), (1, 1, 1)]), st.integers(0, 9))
def test_a_draft_is_what_plain_search_finds(texts, sizes, room):
    draft = jax.device_get(proposer(*sizes)(kit.context(texts, room=room)))
    for row, text in enumerate(texts):
        n, want = lookup(text, *sizes)
        want = want[: max(0, room - 1)]
        found = kit.paths(draft, row)
        assert [path for path, _ in found] == [tuple(want[: i + 1]) for i in range(len(want))]
        assert {round(c * (n + 1), 4) for _, c in found} <= {n}
        assert draft.tree.tokens[row, 0] == text[-1]


def test_the_most_recent_of_the_longest_matches_decides():
    text = [1, 2, 3, 5, 1, 2, 3, 6, 2, 3, 7, 1, 2, 3]
    assert kit.paths(proposer(2, 3, 1)(kit.context([text])))[0][0] == (6,)
    assert kit.paths(proposer(2, 2, 1)(kit.context([text])))[0][0] == (7,)


def test_finished_rows_are_not_drafted_for():
    draft = proposer(4, 2, 1)(kit.context([[1, 1, 1], [1, 1, 1]], active=[True, False]))
    assert draft.tree.valid.sum(-1).tolist() == [5, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 0}, "k: got 0"),
        ({"n_min": 0}, "n_min: got 0"),
        ({"n_max": True}, "n_max: got True"),
        ({"n_max": 2, "n_min": 3}, "n_min: got 3, takes at most n_max, which is 2"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        NGram(**settings)
