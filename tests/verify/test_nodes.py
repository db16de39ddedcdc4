"""The target's law at every node, with the history that the node's own path makes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.sampling.settings import Sampling
from spec_jax.verify.nodes import node_laws
from tests.faults import kit, oracle
from tests.verify.walks import draft, scores

V, PARENTS, TOKENS = 5, (-1, 0, 0, 1, 1, 3), [4, 0, 1, 0, 2, 0]
SAMPLING = Sampling(temperature=0.7, top_p=0.9, presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.4)
NEXT = np.array([[0, 1, -1, 0, 1], [1, -1, 0, -1, 0]])
LOGITS = np.random.default_rng(2).normal(0, 2, (6, V)).astype(np.float32)


def path(node):
    return [] if node == 0 else [*path(PARENTS[node]), TOKENS[node]]


@pytest.mark.parametrize("constrained", [True, False])
def test_every_node_has_its_own_history(constrained):
    s = scores(LOGITS, SAMPLING)
    start = 1 if constrained else 0
    bound = kit.room_for(NEXT if constrained else None, V)
    s = s.replace(constraint=bound, history=s.history.replace(state=jnp.int32(start)))
    got = jax.jit(node_laws)(draft(TOKENS, PARENTS).tree, s)
    for node in range(6):
        state = 0
        for token in path(node):
            state = NEXT[state][token] if state >= 0 else -1
        allowed = NEXT[state] >= 0 if constrained else None
        if constrained and state < 0:
            assert np.isnan(got[node]).all()
            continue
        z = oracle.adjusted(LOGITS[node].astype(np.float64), SAMPLING, (), path(node), allowed=allowed)
        np.testing.assert_allclose(got[node], oracle.law(z, SAMPLING), atol=2e-6)


def test_greedy_and_unadjusted_rows():
    greedy = node_laws(draft(TOKENS, PARENTS).tree, scores(LOGITS, sampled=False, adjusted=False))
    np.testing.assert_array_equal(greedy, np.eye(V)[LOGITS.argmax(1)])
