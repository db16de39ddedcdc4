"""A model that drafts over masks: its draft is one pass over text and masks, and masks leave nothing behind."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.drafters.parallel_model import ParallelModel
from spec_jax.engine.engine import Engine
from spec_jax.engine.round import context_of
from spec_jax.topology.growth import Growth
from tests.drafters.block import kit

CHAIN = Growth(nodes=4, depth=3, width=1, children=1)
MODEL = dataclasses.replace(kit.llama(1)[0], taps=(1,))
DRAFTER = ParallelModel(MODEL, kit.MASK, CHAIN, block=8)


def test_every_rounds_draft_is_one_pass_over_the_text_and_masks():
    target, params = kit.llama(1)
    engine = Engine(target, 16, drafter=DRAFTER, prefill_chunk=8)
    own = jax.tree.map(lambda x: 0.9 * x, params)
    together, state = kit.start(engine, own, params)

    @kit.jit
    def both(state):
        draft, _ = DRAFTER.propose(own, state.drafter, context_of(state.rows, together.constraint))
        tokens, n = state.rows.tokens, state.rows.length[:, None]
        index = jnp.arange(tokens.shape[1] + 2)
        masked = jnp.where(index < n, jnp.pad(tokens, ((0, 0), (0, 2))), kit.MASK)
        features, _ = MODEL.prefill(own, MODEL.init_state(own, tokens.shape[0], 32), masked, n[:, 0] + 2)
        at = n - 1 + jnp.arange(3)
        logits = MODEL.logits(own, jnp.take_along_axis(features[:, :, 0], at[..., None], axis=1))
        return draft.tree.tokens[:, 1:], logits.argmax(-1)

    rounds = 0
    while state.rows.running.any():
        drafted, want = both(state)
        greedy = np.flatnonzero(np.asarray(state.rows.running) & (np.arange(9) < 3))
        np.testing.assert_array_equal(np.asarray(drafted)[greedy], np.asarray(want)[greedy])
        state = kit.go_on(engine, together, state, 1)
        rounds += 1
    want = kit.decoded(Engine(target, 16, prefill_chunk=8), None, params)
    np.testing.assert_array_equal(state.rows.tokens, want.tokens)
    assert 0 < int(state.rows.counters.accepted.sum()) and rounds < 15


def test_a_mask_that_is_no_token_is_refused():
    with pytest.raises(ValueError, match="mask_token is 20; taken: a token id under 20"):
        ParallelModel(kit.llama(1)[0], 20, CHAIN)
