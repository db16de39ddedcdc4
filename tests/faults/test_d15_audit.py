"""D15: cache and positions after every order of accept counts, by a target whose every output betrays a slip."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.engine.requests import request
from spec_jax.models.toy import AuditTarget, audit_table
from tests.faults import kit
from tests.faults.drafters import Follow
from tests.faults.oracle import generate

K, ROUNDS, BUDGET = 3, 4, 24
COUNTS = np.array(list(itertools.product(range(K + 1), repeat=ROUNDS)))
LUT = np.asarray(audit_table(kit.WORDS))
PROMPTS = [[r % 8, 1 + r % 5, 3, 2][: 1 + r % 4] for r in range(4)]


def term(token, position):
    return (token + 1) * pow(5, position, 97) % 97


def digest(text):
    return sum(term(t, i) for i, t in enumerate(text)) % 97


def logits(text):
    return LUT[digest(text)]


TEXTS = [generate(logits, p, BUDGET) for p in PROMPTS]


def run(target=None, max_rounds=kit.ALL):
    e = kit.engine(Follow(K, kit.WORDS))
    e = dataclasses.replace(e, target=target or AuditTarget(kit.WORDS), log_probs=False)
    rows = [r % len(PROMPTS) for r in range(len(COUNTS))]
    plan = kit.plan([PROMPTS[r] + TEXTS[r].tokens for r in rows], COUNTS, K, len(COUNTS))
    requests = kit.batch([request(e, PROMPTS[r], BUDGET) for r in rows], len(COUNTS))
    return kit.run(e, kit.engine_params(e, jnp.asarray(LUT), plan), requests, max_rounds)


def right(state, row):
    """Text, the target's state, and the hash at which every committed token was scored."""
    length, start = int(state.rows.length[row]), int(state.rows.prompt_length[row]) - 1
    text = state.rows.tokens[row, :length].tolist()
    fresh = [digest(text[: i + 1]) for i in range(start, length - 1)]
    return (
        text == (PROMPTS[row % len(PROMPTS)] + TEXTS[row % len(PROMPTS)].tokens)[:length]
        and kit.holds_text(state, row, [term(t, i) for i, t in enumerate(text[:-1])])
        and state.drafter.hashes[row, start : length - 1].tolist() == fresh
        and (state.drafter.hashes[row, length - 1 :] == -1).all()
    )


@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_state_after_each_round(rounds):
    state = run(max_rounds=rounds)
    emitted = (COUNTS[:, :rounds] + 1).sum(1)
    assert (state.rows.length - state.rows.prompt_length == emitted).all()
    assert all(right(state, row) for row in range(len(COUNTS)))


def test_text_to_the_end():
    state = run()
    assert all(right(state, row) and len(kit.output(state, row)) == BUDGET for row in range(len(COUNTS)))


@dataclasses.dataclass(frozen=True)
class Shifted(AuditTarget):
    """One place too far after a round without acceptance, as when lengths follow the draft and not the verdict."""

    def commit(self, state, staged, path, length):
        refused = (length == 1) & (path.shape[1] == K + 1)
        return super().commit(state, staged, path, length + refused)


def test_a_slip_in_the_cache_is_caught():
    state = run(Shifted(kit.WORDS), max_rounds=4)
    assert not any(right(state, row) for row in np.flatnonzero((COUNTS == 0).any(1)))
    assert all(right(state, row) for row in np.flatnonzero((COUNTS > 0).all(1)))
