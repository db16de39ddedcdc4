"""D01: an end-of-sequence token inside an accepted block ends the text there; the token itself is kept."""

import jax.numpy as jnp

from spec_jax.engine import round as rounds
from spec_jax.engine import stops
from spec_jax.engine.requests import request
from tests.faults import kit
from tests.faults.oracle import generate

BLOCK = 5
TABLES = kit.row_tables(1)
PROMPTS = [[r % kit.WORDS, (r // 3) % kit.WORDS][: 1 + r % 2] for r in range(kit.ROWS)]
LONG = [generate(kit.logits_of(TABLES[r]), PROMPTS[r], 24) for r in range(kit.ROWS)]


def first_at(tokens):
    """Places 0 .. BLOCK at which the run has a token for the first time: it can be made the end there."""
    return [i for i in range(BLOCK + 1) if tokens[i] not in tokens[:i]]


def cases():
    """Row and place: every row as often as there are rows to fill, places in turn."""
    found = [(r, i) for i in range(BLOCK + 1) for r in range(kit.ROWS) if i in first_at(LONG[r].tokens)]
    return found[:: max(1, len(found) // 60)]


def run(chosen, size=kit.ROWS, **changes):
    at = jnp.asarray([r for r, _ in chosen] + [chosen[0][0]] * (size - len(chosen)))
    texts = [PROMPTS[r] + LONG[r].tokens for r, _ in chosen]
    e, params = kit.follow(TABLES[at], texts, length=BLOCK, size=size, **changes)
    requests = [request(e, PROMPTS[r], 24, eos=[LONG[r].tokens[i]]) for r, i in chosen]
    return kit.run(e, params, kit.batch(requests, size))


def right(state, chosen):
    return [
        kit.same_text(state, n, generate(kit.logits_of(TABLES[r]), PROMPTS[r], 24, eos=[LONG[r].tokens[i]]))
        and kit.holds_text(state, n)
        for n, (r, i) in enumerate(chosen)
    ]


def test_every_place_of_the_block():
    chosen = cases()
    assert {i for _, i in chosen} == set(range(BLOCK + 1))
    state = run(chosen)
    assert all(right(state, chosen))
    assert all(kit.finish(state, n) == "EOS" for n in range(len(chosen)))
    assert (state.rows.counters.rounds[: len(chosen)] == 1).all()
    assert [kit.output(state, n)[-1] for n, _ in enumerate(chosen)] == [LONG[r].tokens[i] for r, i in chosen]


def test_a_batch_of_one():
    for case in cases()[5::20]:
        assert right(run([case], 1), [case]) == [True]


def test_an_end_that_only_the_last_token_can_make_is_caught(monkeypatch):
    def late(rows, verdict, max_len):
        without = rows.replace(sampling=rows.sampling.replace(eos=jnp.full_like(rows.sampling.eos, -1)))
        keep, finish = stops.trim(without, verdict, max_len)
        last = jnp.take_along_axis(verdict.tokens, jnp.maximum(keep - 1, 0)[:, None], axis=1)
        eos = (last == rows.sampling.eos).any(-1) & rows.running
        return keep, jnp.where(eos, stops.Finish.EOS, finish)

    monkeypatch.setattr(rounds, "trim", late)
    chosen = cases()[:60]
    good = right(run(chosen, 60, log_probs=False), chosen)
    assert not any(good[n] for n, (_, i) in enumerate(chosen) if i < BLOCK)
