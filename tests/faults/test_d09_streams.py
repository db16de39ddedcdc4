"""D09: draft noise, acceptance uniforms and residual noise are independent."""

import numpy as np
import pytest

from tests.faults.lawkit import PLAIN, P, Q, guess, sample
from tests.faults.laws import fit

TARGET, DRAFT = (np.log(np.tile(x, (6, 1))) for x in (P, Q))


def first_tokens(noise):
    """One drafted position, then a plain one; the first token and whether the draft was refused."""
    texts, state = sample(TARGET, guess(DRAFT, PLAIN, k=1, noise=noise), PLAIN, 2)
    return texts[:, :1], state.rows.counters.accepted == 0


def law(p):
    return {(v,): x for v, x in enumerate(np.asarray(p) / np.sum(p))}


def test_marginal_and_residual():
    tokens, refused = first_tokens("own")
    assert fit(tokens, law(P)).ok
    residual = np.maximum(np.array(P) - Q, 0)
    assert abs(refused.mean() - residual.sum()) < 4 * (0.25 / len(refused)) ** 0.5
    assert fit(tokens[refused], {cell: p for cell, p in law(residual).items() if p > 0}).ok


@pytest.mark.parametrize("noise", ["residual", "acceptance"])
def test_a_reused_stream_is_caught(noise):
    assert not fit(first_tokens(noise)[0], law(P)).ok
