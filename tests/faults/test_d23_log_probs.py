"""D23: the log-prob of every emitted token stands at its slot, for full, partial and no acceptance."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.engine.requests import request
from spec_jax.sampling.settings import Sampling
from spec_jax.verify.match import match
from tests.faults import kit
from tests.faults.oracle import generate

K, BUDGET = 3, 20
TABLES = kit.row_tables(23, scale=2.0)
# Rows 0 and 1 know what comes: one token is certain everywhere.
TABLES = TABLES.at[:2].set(jnp.where(jnp.arange(kit.WORDS) == 5, 0.0, -jnp.inf))
COUNTS = np.random.default_rng(3).integers(0, K + 1, (kit.ROWS, 20))
COUNTS[:4] = [[0], [1], [2], [3]]
SETTINGS = {
    "plain": Sampling(temperature=1.0),
    "truncated": Sampling(temperature=0.6, top_p=0.9, frequency_penalty=0.5),
    "greedy": Sampling(),
}
NOISE = kit.gumbels(np.stack([kit.key_of(r) for r in range(kit.ROWS)]))


def run(sampling, size=kit.ROWS, **changes):
    want = [generate(kit.logits_of(TABLES[r]), [r % 8], BUDGET, sampling, NOISE[r]) for r in range(size)]
    texts = [[r % 8, *text.tokens] for r, text in enumerate(want)]
    e, params = kit.follow(TABLES[:size], texts, COUNTS[:size], K, size=size, **changes)
    requests = [request(e, [r % 8], BUDGET, r, sampling) for r in range(size)]
    return kit.run(e, params, kit.batch(requests, size)), want


@pytest.mark.parametrize("name", SETTINGS)
def test_every_slot(name):
    state, want = run(SETTINGS[name])
    assert set((state.rows.counters.accepted / state.rows.counters.drafted)[:4].round(1)) >= {0.0, 1.0}
    for r, text in enumerate(want):
        assert kit.same_text(state, r, text)
        raw, law = (x[r, 1 : 1 + BUDGET] for x in (state.rows.raw_log_probs, state.rows.log_probs))
        np.testing.assert_allclose(raw, text.raw_log_probs, rtol=0, atol=1e-6)
        np.testing.assert_allclose(law, text.log_probs, rtol=0, atol=1e-6)
        assert ((raw == 0) == (r < 2)).all() and np.isfinite(raw).all() and np.isfinite(law).all()
        assert name != "greedy" or (law == 0).all()


def shifted_match(key, draft, scores, m):
    """Each value one slot late, the first one twice."""
    verdict = match(key, draft, scores, m)
    late = lambda x: jnp.concatenate([x[:1], x[:-1]])  # noqa: E731
    return dataclasses.replace(verdict, raw_log_probs=late(verdict.raw_log_probs), log_probs=late(verdict.log_probs))


def test_a_value_in_the_next_slot_is_caught():
    state, want = run(SETTINGS["plain"], size=8, rule=shifted_match)
    assert [kit.same_text(state, r, want[r]) for r in range(8)] == [r < 2 or not COUNTS[r].any() for r in range(8)]
