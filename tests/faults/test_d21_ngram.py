"""D21: prompt lookup on every short text: a draft is the continuation of an earlier occurrence, or empty."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.drafters.drafter import Context
from spec_jax.drafters.ngram import NGram
from spec_jax.engine.requests import request
from spec_jax.sampling.constraint import free
from spec_jax.sampling.settings import Sampling, to_row
from tests.faults import kit
from tests.faults.oracle import generate

WORDS, LONGEST, K = 3, 7, 4
TEXTS = [t for n in range(1, LONGEST + 1) for t in itertools.product(range(WORDS), repeat=n)]


def lookup(text, k, n_min, n_max):
    """The continuation of the latest earlier occurrence of the longest matching n-gram, running on into itself."""
    for n in range(min(n_max, len(text) - 1), n_min - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                known = list(text)
                for i in range(k):
                    known.append(known[end + i])
                return known[len(text) :]
    return []


def propose(drafter, room):
    size = len(TEXTS)
    tokens = np.full((size, LONGEST + 2), WORDS - 1)  # what lies behind the text looks like tokens
    for row, text in zip(tokens, TEXTS, strict=True):
        row[: len(text)] = text
    whole = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.int32), (size,))  # noqa: E731
    lengths = whole([len(text) for text in TEXTS])
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (size, *x.shape)), to_row(Sampling(), WORDS))
    off = jnp.bool_(False)
    keys = jnp.zeros((size, 2), jnp.uint32)
    context = Context(
        jnp.asarray(tokens), lengths, whole(1), whole(room), whole(1) > 0, keys, rows, whole(0), free(WORDS), off, off
    )
    return jax.device_get(jax.jit(lambda c: drafter.propose(None, (), c)[0])(context))


def checked(draft, room, n_min, n_max):
    """Whether each text's draft is right, and how many are to be empty."""
    wanted = [lookup(text, K, n_min, n_max)[: max(0, room - 1)] for text in TEXTS]
    rows = zip(TEXTS, wanted, draft.tree.tokens, draft.tree.valid, strict=True)
    right = [
        t[0] == text[-1] and t[1 : ok.sum()].tolist() == want and ok[: 1 + len(want)].all()
        for text, want, t, ok in rows
    ]
    return right, sum(not want for want in wanted)


@pytest.mark.parametrize(("n_min", "n_max"), [(1, 3), (2, 3), (1, 1)])
@pytest.mark.parametrize("room", [1, 3, 9])
def test_every_text(n_min, n_max, room):
    draft = propose(NGram(K, n_max, n_min), room)
    right, empty = checked(draft, room, n_min, n_max)
    assert all(right) and (room == 1 or 0 < empty < len(TEXTS))
    assert ((draft.tree.tokens >= 0) & (draft.tree.tokens < WORDS)).all()


def test_another_n_gram_and_a_draft_beyond_the_room_are_caught():
    draft = propose(NGram(K, 3, 1), 3)
    assert not all(checked(draft, 3, 2, 3)[0]) and not all(checked(draft, 3, 1, 2)[0])
    assert not all(checked(draft, 2, 1, 3)[0])


@pytest.mark.parametrize("eos", [(), (2,)])
def test_short_prompts(eos):
    """Prompts shorter than the n-gram: a round without a draft is a plain step."""
    tables = kit.row_tables(21)
    e = kit.engine(NGram(K, 3, 2))
    prompts = [[r % kit.WORDS] * (1 + r % 3) for r in range(kit.ROWS)]
    requests = kit.batch([request(e, p, 24, eos=eos) for p in prompts])
    params = kit.engine_params(e, tables)
    first, state = kit.run(e, params, requests, 1), kit.run(e, params, requests)
    for r, prompt in enumerate(prompts):
        assert kit.same_text(state, r, generate(kit.logits_of(tables[r]), prompt, 24, eos=eos))
        if len(prompt) < 3:
            assert len(kit.output(first, r)) == 1 and first.rows.counters.drafted[r] == 0


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="n_min: got 4, takes at most n_max"):
        NGram(n_min=4, n_max=3)
    with pytest.raises(ValueError, match="k: got 0"):
        NGram(k=0)
