"""What is remembered of prompts, and the drafts of siblings, against searches in plain Python."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.drafters.siblings import Siblings, siblings
from spec_jax.rollout import memory
from tests.drafters import kit


def rings(m):
    """Each prompt's ring as a list of outputs, the oldest first."""
    out = []
    for ring, head in zip(np.asarray(m.tokens), np.asarray(m.head), strict=True):
        whole, texts = np.roll(ring, -head).tolist(), [[]]
        for token in whole:
            texts[-1].append(token) if token >= 0 else texts.append([])
        out.append([t for t in texts if t])
    return out


def test_outputs_are_kept_by_prompt():
    """With the prompt's end before them, the oldest lost first; rows without an output or a place are left out."""
    remember = jax.jit(memory.remember)
    m = memory.empty(3, 20)
    text = jnp.arange(30)[None] % 7 + jnp.array([[0], [10], [20]])
    m = remember(m, jnp.array([1, 1, -1]), text, jnp.array([3, 12, 2]), jnp.array([6, 15, 9]), 4)
    assert rings(m) == [[], [text[0, :6].tolist(), text[1, 4:15].tolist()], []] and m.version.tolist() == [0, 4, 0]
    m = remember(m, jnp.array([1, 2, 0]), text, jnp.array([2, 5, 5]), jnp.array([8, 5, 7]), 5)
    assert rings(m)[1][-1] == text[0, :8].tolist() and rings(m)[1][0] == text[1, 4:15].tolist()[-10:]
    assert rings(m)[2] == [] and rings(m)[0] == [text[2, :7].tolist()] and m.version.tolist() == [5, 5, 0]
    assert (memory.recall(m, jnp.array([2, -1, 7])) == -1).all()
    np.testing.assert_array_equal(memory.recall(m, jnp.array([1]))[0], m.tokens[1])
    assert rings(memory.clear(m, jnp.array([1, -1])))[1] == [] and rings(memory.clear(m, jnp.array([1])))[0]
    m = dataclasses.replace(m, version=jnp.array([3, 5, 0]))
    assert rings(memory.drop_older(m, 4))[0] == [] and rings(memory.drop_older(m, 4))[1]


def chain(draft, row, width):
    """The first chain of a draft's row."""
    tree, at, out = jax.tree.map(lambda x: np.asarray(x)[row], draft.tree), 0, []
    while True:
        below = [i for i in range(len(tree.parent)) if tree.parent[i] == at and tree.valid[i] and i]
        if not below or len(out) == width:
            return out
        at = below[0]
        out.append(int(tree.tokens[at]))


D = Siblings(nodes=6, candidates=4, longest=6, peers=2, memory=24)
PROPOSE = jax.jit(lambda state, c: D.propose(None, state, c)[0])


def propose(texts, prompt_length, remembered=None, **changes):
    c = kit.context(texts, prompt_length=prompt_length, **changes)
    state = D.init(None, len(texts), c.tokens.shape[1])
    if remembered is not None:
        state = D.recall(state, jnp.asarray(remembered))
    return PROPOSE(state, c)


def test_a_sibling_that_is_ahead_says_what_follows():
    texts = [[1, 2, 3, 0, 5, 6, 4, 7], [1, 2, 3, 0, 5], [1, 2, 4, 0, 5]]
    draft = propose(texts, 3)
    assert chain(draft, 1, 3) == [6, 4, 7]
    # The third row has another prompt, and nothing of its own to go by.
    assert chain(draft, 2, 3) == []
    same = siblings(*[getattr(kit.context(texts, prompt_length=3), n) for n in ("tokens", "prompt_length")])
    np.testing.assert_array_equal(same, [[0, 1, 0], [1, 0, 0], [0, 0, 0]])


def test_what_most_siblings_say_comes_first():
    """Consensus: of three samples that go on from the same place, two agree."""
    remembered = np.full((1, 24), -1)
    remembered[0, :15] = [2, 3, 5, 6, -1, 2, 3, 7, 6, -1, 2, 3, 5, 6, -1]
    draft = propose([[1, 2, 3]], 3, remembered)
    assert chain(draft, 0, 2) == [5, 6]
    tokens, valid = np.asarray(draft.tree.tokens[0]), np.asarray(draft.tree.valid[0])
    assert 7 in tokens[valid] and draft.confidence[0, 1] > draft.confidence[0, np.flatnonzero(tokens == 7)[0]]


def test_rows_are_emptied_and_replaced():
    state = D.init(None, 3, 10)
    state = D.insert(state, jnp.array([1, 5]), D.recall(D.init(None, 2, 10), jnp.ones((2, 24), jnp.int32)))
    assert (state.memory == 1).all(1).tolist() == [False, True, False]
    assert (D.release(state, jnp.array([1]), jnp.zeros((1, 10), jnp.int32), jnp.ones(1, jnp.int32)).memory == -1).all()


@pytest.mark.parametrize(
    "options",
    [{"nodes": 1}, {"candidates": 0}, {"longest": 0}, {"peers": -1}, {"memory": -1}, {"memory": 9, "longest": 9}],
)
def test_bad_settings_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Siblings(**options)
    with pytest.raises(ValueError, match="size"):
        memory.empty(1, 0)
