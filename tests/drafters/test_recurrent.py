"""A recurrent head: what it drafts with is what training sees, and its steps are the formula's."""

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.drafters import medusa, recurrent
from spec_jax.engine.engine import Engine
from spec_jax.engine.round import context_of
from spec_jax.topology.growth import Growth
from tests.drafters.block import kit
from tests.drafters.eagle import kit as heads

CONFIG = recurrent.RecurrentConfig(heads.V, heads.H, num_blocks=1, final_norm_eps=heads.EPS)


def test_a_drafted_chains_logits_are_the_formulas():
    own = heads.params(CONFIG)
    chain = Growth(nodes=4, depth=3, width=1, children=1)
    engine = Engine(
        medusa.tapped(CONFIG, kit.llama()[0]), 24, drafter=recurrent.drafter(CONFIG, chain), prefill_chunk=8
    )
    together, state = kit.start(engine, own)
    rows, target = state.rows, engine.target

    @kit.jit
    def both():
        draft, _ = engine.drafter.propose(own, state.drafter, context_of(rows, together.constraint))
        given = target.init_state(together.target, rows.tokens.shape[0], 32)
        features, _ = target.prefill(together.target, given, rows.tokens, jnp.maximum(rows.length - 1, 0))
        drafted = draft.tree.tokens[:, None, 1:]
        said = recurrent.text_logits(CONFIG, own, features, rows.tokens, rows.length[:, None] - 1, drafted)
        return draft, said[:, 0], features

    draft, said, features = jax.device_get(both())
    known = np.asarray(rows.length) > 1
    np.testing.assert_array_equal(draft.tree.tokens[known, 1:][:4], said.argmax(-1)[known][:4])
    assert not draft.tree.valid[~known, 1:].any() and known.sum() > 3

    row, silu = 0, lambda x: x / (1 + np.exp(-x))
    e = np.asarray(own.ends.embedding).T
    hidden = np.asarray(own.ends.final(jnp.asarray(features[row, int(rows.length[row]) - 2, 0]), heads.EPS))
    s = e[int(rows.tokens[row, int(rows.length[row]) - 1])]
    for i in range(3):
        x = np.concatenate([s, hidden])
        for block in own.blocks:
            x = x + silu(x @ np.asarray(block.linear.kernel) + np.asarray(block.linear.bias))
        np.testing.assert_allclose(said[row, i], x @ np.asarray(own.output.kernel), rtol=1e-4, atol=1e-4)
        token = int(draft.tree.tokens[row, i + 1])
        s = silu(s @ np.asarray(own.across.kernel) + e[token] @ np.asarray(own.into.kernel) + np.asarray(own.into.bias))
