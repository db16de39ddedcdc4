"""D20: text runs to the last slot and not beyond, whatever the prompt's length and the drafter."""

import pytest

from spec_jax.engine import round as rounds
from spec_jax.engine import stops
from spec_jax.engine.requests import request
from spec_jax.engine.state import Finish
from tests.faults import kit
from tests.faults.oracle import generate

TABLES = kit.row_tables(20)
# Every number of slots left from 0 to 19, and prompts of one token.
LENGTHS = [kit.MAX_LEN - r % 20 if r < 80 else 1 for r in range(kit.ROWS)]
PROMPTS = [[(r + 3 * i) % kit.WORDS for i in range(n)] for r, n in enumerate(LENGTHS)]
WANT = [generate(kit.logits_of(TABLES[r]), p, kit.MAX_LEN - len(p)) for r, p in enumerate(PROMPTS)]


def engines():
    texts = [p + text.tokens for p, text in zip(PROMPTS, WANT, strict=True)]
    plain = kit.engine()
    return {
        "no drafter": (plain, kit.engine_params(plain, TABLES)),
        "perfect": kit.follow(TABLES, texts, length=4),
        "scripted": kit.follow(TABLES, texts, counts=[0, 4, 2], length=4),
        "tree": kit.tree(TABLES),
    }


@pytest.mark.parametrize("name", ["no drafter", "perfect", "scripted", "tree"])
def test_length_limit(name):
    e, params = engines()[name]
    state = kit.run(e, params, kit.batch([request(e, p) for p in PROMPTS]))
    assert (state.rows.length == kit.MAX_LEN).all()
    assert (state.rows.finish == Finish.MAX_LEN).all()
    for r in range(kit.ROWS):
        assert kit.same_text(state, r, WANT[r]) and kit.holds_text(state, r)


def test_a_prompt_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match=f"prompt: got {kit.MAX_LEN + 1} tokens"):
        request(kit.engine(), [0] * (kit.MAX_LEN + 1))
    with pytest.raises(ValueError, match="max_new_tokens: got 3 behind a prompt"):
        request(kit.engine(), [0] * (kit.MAX_LEN - 2), 3)


def test_a_slot_too_many_is_caught(monkeypatch):
    more = lambda rows, verdict, max_len: stops.trim(rows.replace(limit=rows.limit + 1), verdict, max_len + 1)  # noqa: E731
    monkeypatch.setattr(rounds, "trim", more)
    e, params = engines()["perfect"]
    state = kit.run_anew(e, params, kit.batch([request(e, p) for p in PROMPTS]))
    full = [len(p) == kit.MAX_LEN for p in PROMPTS]
    assert (state.rows.length == kit.MAX_LEN).tolist() == full  # those without a slot left have no round
