"""D30: a run that is paused and goes on, in place or from its text alone, gives the text of one that was not."""

import dataclasses

import jax
import numpy as np
import pytest

from spec_jax.engine.requests import request
from spec_jax.sampling.settings import Sampling
from tests.faults import kit
from tests.faults.oracle import generate

TABLES = kit.row_tables(30)
BUDGET = 24
SAMPLING = [Sampling(temperature=0.9, frequency_penalty=r % 3, min_new_tokens=r % 2 * 6) for r in range(kit.ROWS)]
# Every odd token turns the state; one state forbids 7, the other 0.
TURNS = np.arange(kit.WORDS) % 2
GRAMMAR = np.stack([TURNS, 1 - TURNS])
GRAMMAR[0, 7] = GRAMMAR[1, 0] = -1
NOISE = kit.gumbels(np.stack([kit.key_of(r) for r in range(kit.ROWS)]))
EOS = 6
WANT = [
    generate(kit.logits_of(TABLES[r]), [r % 6, 5], BUDGET, SAMPLING[r], NOISE[r], [EOS], grammar=(GRAMMAR, 0))
    for r in range(kit.ROWS)
]


def setup(counts):
    texts = [[r % 6, 5, *text.tokens] for r, text in enumerate(WANT)]
    e, params = kit.follow(TABLES, texts, counts, 4)
    return e, dataclasses.replace(params, constraint=kit.room_for(GRAMMAR, kit.WORDS))


def requests(e, generated=None):
    options = {"eos": [EOS], "constraint_start": 1}
    given = [() if generated is None else generated[r] for r in range(kit.ROWS)]
    rows = [request(e, [r % 6, 5], BUDGET, r, SAMPLING[r], generated=given[r], **options) for r in range(kit.ROWS)]
    return kit.batch(rows)


def right(state, r):
    return kit.output(state, r) == WANT[r].tokens and kit.finish(state, r) == WANT[r].finish


def check(state):
    assert all(right(state, r) and kit.holds_text(state, r) for r in range(kit.ROWS))


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_going_on_in_place_delivers_each_token_once(chunk):
    e, params = setup([4, 0, 2, 1])
    state = kit.run(e, params, requests(e), chunk)
    delivered = [kit.output(state, r) for r in range(kit.ROWS)]
    while (state.rows.finish == 0).any():
        before = state.rows.length
        state = jax.device_get(kit.go_on(e, params, jax.device_put(state), chunk))
        for r in range(kit.ROWS):
            delivered[r] += state.rows.tokens[r, before[r] : state.rows.length[r]].tolist()
    check(state)
    assert delivered == [text.tokens for text in WANT]


@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 5])
def test_going_on_from_the_text_alone(rounds):
    """The slots are lost and prefilled again; what was drafted is forgotten, and the drafts are others."""
    e, params = setup([4, 0, 2, 1])
    paused = kit.run(e, params, requests(e), rounds)
    running = paused.rows.finish == 0
    texts = [kit.output(paused, r) if running[r] else () for r in range(kit.ROWS)]
    assert running.any()
    e, params = setup([1, 3])
    check(kit.run(e, params, requests(e, texts)))


def test_going_on_as_if_the_text_were_a_prompt_is_caught():
    """Penalties, the least length and the constraint's state must know what was generated, and the budget as well."""
    e, params = setup([4, 0, 2, 1])
    paused = kit.run(e, params, requests(e), 2)
    texts = [[r % 6, 5, *kit.output(paused, r)] for r in range(kit.ROWS)]
    options = {"eos": [EOS], "constraint_start": 1}
    left = [BUDGET + 2 - len(text) for text in texts]
    rows = [request(e, t, n, r, SAMPLING[r], **options) for r, (t, n) in enumerate(zip(texts, left, strict=True))]
    state = kit.run(e, params, kit.batch(rows))
    going = np.flatnonzero(paused.rows.finish == 0)
    same = [texts[r][2:] + kit.output(state, r) == WANT[r].tokens for r in going]
    assert sum(same) < 0.8 * len(going)


def test_text_outside_the_constraint_does_not_go_on():
    e, params = setup([4])
    state = kit.run(e, params, requests(e, [[7]] * kit.ROWS))
    assert all(kit.output(state, r) == [7] and kit.finish(state, r) == "INVALID" for r in range(kit.ROWS))


def test_a_text_that_has_ended_is_refused():
    e, _ = setup([4])
    with pytest.raises(ValueError, match="generated: got a text .* ends at token 1"):
        request(e, [1], 5, eos=[EOS], generated=[2, EOS])
    with pytest.raises(ValueError, match="generated: got a text .* ends at token 2"):
        request(e, [1], 5, stops=[[2, 3]], generated=[4, 2, 3])
    request(e, [1], 5, sampling=Sampling(min_new_tokens=4), stops=[[2, 3]], generated=[4, 2, 3])
