"""Training's passes over texts: gradients, and which rows of a text can change what."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.drafters.eagle.text import text_steps
from tests.drafters.block.kit import H, V
from tests.drafters.eagle import kit
from tests.faults.kit import jit

T, ANCHORS = 9, jnp.array([[2, 5], [0, 6]])


def inputs(config, seed=3):
    rng = np.random.default_rng(seed)
    taps = len(config.taps) if kit.is_eagle(config) else 1
    features = jnp.asarray(rng.normal(0, 1, (2, T, taps, H)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, V, (2, T)), jnp.int32)
    at = jnp.minimum(ANCHORS[:, :, None] + 1 + jnp.arange(kit.K), T - 1)
    blocks = jnp.take_along_axis(tokens, at.reshape(2, -1), axis=1).reshape(at.shape)
    return features, tokens, blocks


@pytest.mark.parametrize("name", ("eagle3", "p_eagle", "hydra"))
def test_every_trained_leaf_gets_a_gradient(name):
    config, own = kit.CONFIGS[name], kit.params(kit.CONFIGS[name])
    features, tokens, blocks = inputs(config)
    trained = (own.network, own.lm_head) if kit.is_eagle(config) else (own.blocks, own.outputs)

    def loss(trained):
        first, second = ("network", "lm_head") if kit.is_eagle(config) else ("blocks", "outputs")
        params = own.replace(**{first: trained[0], second: trained[1]})
        z = kit.text_logits(config, params, features, tokens, ANCHORS, blocks)
        z = jnp.where(jnp.isfinite(z), z, -1e9)
        return -jax.nn.log_softmax(z)[..., 1].sum()

    for leaf in jax.tree.leaves(jit(jax.grad(loss))(trained)):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0


@pytest.mark.parametrize("name", ("eagle3", "p_eagle", "eagle1"))
def test_an_anchor_sees_what_was_there_before_it(name):
    """Features below the anchor and tokens up to it, and for a chain the right tokens before a step."""
    config, own = kit.CONFIGS[name], kit.params(kit.CONFIGS[name])
    features, tokens, blocks = inputs(config)
    run = jit(lambda f, t, b: text_steps(config, own, f, t, ANCHORS, b).logits)
    was = np.asarray(run(features, tokens, blocks))
    assert (was[1, 0] == 0).all() and np.abs(was[0]).min() > 0
    same = lambda other: np.abs(np.asarray(other) - was).max(-1) < 1e-6  # noqa: E731  [b, a, d]
    assert same(run(features.at[:, 5:].add(1.0), tokens.at[:, 6:].set(0), blocks))[0].all()
    later = same(run(features.at[0, 4].add(1.0), tokens, blocks))
    assert later[0, 0].all() and not later[0, 1].any()
    step = same(run(features, tokens, (blocks + 1) % V))[0]
    if name == "p_eagle":
        assert step.all()
    else:
        assert step[:, 0].all() and not step[:, 1:].any()
    step = same(run(features, tokens, blocks.at[:, :, 1].set((blocks[:, :, 1] + 1) % V)))[0]
    assert step[:, :2].all() and step[:, 2].all() == (name == "p_eagle")


def test_features_are_the_targets_own_at_the_steps():
    """What EAGLE-1 fits its outputs to: step i stands for the state behind the token at anchor + i."""
    config, own = kit.CONFIGS["eagle1"], kit.params(kit.CONFIGS["eagle1"])
    features, tokens, blocks = inputs(config)
    out = text_steps(config, own, features, tokens, ANCHORS, blocks)
    want = own.ends.final(features[:, :, 0], config.final_norm_eps)
    np.testing.assert_allclose(out.features[0, 1, 2], want[0, 7], atol=1e-6)
    np.testing.assert_allclose(out.features[0, 0, 0], want[0, 2], atol=1e-6)
