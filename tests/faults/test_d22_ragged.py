"""D22: rows of a batch accept different numbers of tokens, and each is its own run."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.engine import round as rounds
from spec_jax.engine import stops
from spec_jax.engine.requests import request
from spec_jax.sampling.settings import Sampling
from tests.faults import kit
from tests.faults.oracle import generate

TABLES = kit.row_tables(22)
RNG = np.random.default_rng(22)
PROMPTS = [RNG.integers(0, kit.WORDS, 1 + r % 9).tolist() for r in range(kit.ROWS)]
BUDGETS = [10 + r % 21 for r in range(kit.ROWS)]
SETTINGS = {
    "greedy": [Sampling()] * kit.ROWS,
    "sampled": [Sampling(0.7 + r % 4 / 4, top_k=r % 3 * 3, presence_penalty=r % 2) for r in range(kit.ROWS)],
    "mixed": [Sampling(temperature=r % 2) for r in range(kit.ROWS)],
}
NOISE = kit.gumbels(np.stack([kit.key_of(r) for r in range(kit.ROWS)]))


def wanted(name):
    given = zip(PROMPTS, BUDGETS, SETTINGS[name], NOISE, strict=True)
    return [generate(kit.logits_of(TABLES[r]), p, b, s, noise) for r, (p, b, s, noise) in enumerate(given)]


def run(name, want, size=kit.ROWS, **changes):
    texts = [p + text.tokens for p, text in zip(PROMPTS, want, strict=True)][:size]
    counts = np.random.default_rng(1).integers(0, 4, (size, 16))
    counts[:2, :2] = [[0, 3], [1, 0]]
    e, params = kit.follow(TABLES[:size], texts, counts, 3, size=size, **changes)
    given = list(zip(PROMPTS, BUDGETS, range(kit.ROWS), SETTINGS[name], strict=True))[:size]
    return kit.run(e, params, kit.batch([request(e, *g) for g in given], size))


@pytest.mark.parametrize("name", SETTINGS)
def test_each_row_is_its_own_run(name):
    want = wanted(name)
    state = run(name, want)
    assert all(kit.same_text(state, r, want[r]) and kit.holds_text(state, r) for r in range(kit.ROWS))
    assert len(set(state.rows.counters.rounds.tolist())) > 5


def test_one_length_for_all_is_caught(monkeypatch):
    """The block is cut to the shortest row's, but the state moves by each row's own length."""

    def shortest(rows, verdict, max_len):
        keep, finish = stops.trim(rows, verdict, max_len)
        return jnp.where(keep > 0, jnp.min(jnp.where(keep > 0, keep, keep.max())), 0), finish

    monkeypatch.setattr(rounds, "trim", shortest)
    want = wanted("greedy")
    state = run("greedy", want, 8, log_probs=False)
    assert not all(kit.same_text(state, r, want[r]) for r in range(8))
