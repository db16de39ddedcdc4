"""D03: a stop sequence inside a long accepted block, or across blocks, ends the text right behind it."""

import pytest

from spec_jax.engine import round as rounds
from spec_jax.engine import stops
from spec_jax.engine.requests import request
from spec_jax.sampling.settings import Sampling
from tests.faults import kit
from tests.faults.oracle import generate

TABLES = kit.row_tables(3)
PROMPTS = [[r % kit.WORDS, 2, 1 + r % 5] for r in range(kit.ROWS)]
LONG = [generate(kit.logits_of(TABLES[r]), PROMPTS[r], 30).tokens for r in range(kit.ROWS)]
# A stop that ends at places 0 .. 9 of the run, one to three tokens long, and one that begins like the text only.
ENDS = [LONG[r][max(0, r % 10 - r // 10 % 3) : r % 10 + 1] for r in range(kit.ROWS)]
STOPS = [[ENDS[r], [*LONG[r][:3], (LONG[r][3] + 1) % kit.WORDS]] for r in range(kit.ROWS)]
WANT = [generate(kit.logits_of(TABLES[r]), PROMPTS[r], 30, stops=STOPS[r]) for r in range(kit.ROWS)]


@pytest.mark.parametrize("k", range(1, 8))
def test_every_draft_length_gives_the_same_answer(k):
    e, params = kit.follow(TABLES, [p + t for p, t in zip(PROMPTS, LONG, strict=True)], length=k)
    state = kit.run(e, params, kit.batch([request(e, p, 30, stops=s) for p, s in zip(PROMPTS, STOPS, strict=True)]))
    for r in range(kit.ROWS):
        assert kit.same_text(state, r, WANT[r])
        assert kit.holds_text(state, r)
    assert sum(kit.finish(state, r) == "STOP" for r in range(kit.ROWS)) > kit.ROWS * 0.9


def test_a_stop_needs_to_be_generated_whole_and_late_enough():
    """The prompt's last token does not begin a stop, and min_new_tokens lets an early one pass."""
    e, params = kit.follow(TABLES, [p + t for p, t in zip(PROMPTS, LONG, strict=True)])
    across = [[[PROMPTS[r][-1], LONG[r][0]]] for r in range(kit.ROWS)]
    settings = [Sampling(min_new_tokens=r % 2 * 12) for r in range(kit.ROWS)]
    stops = [across[r] if r % 4 < 2 else STOPS[r] for r in range(kit.ROWS)]
    given = zip(PROMPTS, settings, stops, strict=True)
    state = kit.run(e, params, kit.batch([request(e, p, 30, sampling=s, stops=x) for p, s, x in given]))
    for r in range(kit.ROWS):
        want = generate(kit.logits_of(TABLES[r]), PROMPTS[r], 30, settings[r], stops=stops[r])
        assert kit.same_text(state, r, want)
    early = [r for r in range(kit.ROWS) if stops[r] is STOPS[r] and r % 2]
    assert all(len(kit.output(state, r)) >= 12 for r in early)


def test_a_stop_that_is_looked_for_in_its_block_alone_is_caught(monkeypatch):
    begun = lambda rows, verdict, max_len: stops.trim(rows.replace(prompt_length=rows.length), verdict, max_len)  # noqa: E731
    monkeypatch.setattr(rounds, "trim", begun)
    e, params = kit.follow(TABLES, [p + t for p, t in zip(PROMPTS, LONG, strict=True)], length=3)
    asked = [request(e, p, 30, stops=s) for p, s in zip(PROMPTS, STOPS, strict=True)]
    state = kit.run_anew(e, params, kit.batch(asked))
    right = [kit.same_text(state, r, WANT[r]) for r in range(kit.ROWS)]
    assert any(right) and sum(right) < kit.ROWS - 10
