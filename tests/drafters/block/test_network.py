"""The network: decoding and training agree, masks and windows are those of the published rules, `dflash` agrees."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.drafters.block import network
from spec_jax.drafters.block.config import FULL, SLIDING, causal_layers, default_taps
from spec_jax.drafters.block.drafter import BlockDrafter, chain
from spec_jax.drafters.block.network import Context
from spec_jax.drafters.drafter import Committed
from spec_jax.models.norms import rms_norm
from tests.drafters.block import kit

KINDS = {
    "full": {},
    "block-causal": {"causal": (True, True)},
    "sliding causal": {"layer_types": (SLIDING, FULL), "causal": (True, False), "sliding_window": 3},
    "sliding": {"layer_types": (SLIDING, SLIDING), "sliding_window": 3},
    "convolved": {"conv_kernel_size": 2, "conv_group_size": 8},
    "per layer": {"per_layer_features": True},
}


def context_of(c, params, features, slots):
    b, n = features.shape[:2]
    k, v = network.context_rows(c, params.network, features, jnp.broadcast_to(jnp.arange(n), (b, n)), slots)
    pad = ((0, 0), (0, 0), (0, slots - n), (0, 0))
    room = lambda x: jnp.pad(x.swapaxes(1, 2), pad, constant_values=jnp.nan)  # noqa: E731
    return lambda length: Context(tuple(map(room, k)), tuple(map(room, v)), length, slots)


@pytest.mark.parametrize("kind", KINDS)
def test_training_sees_what_decoding_sees(kind):
    c = kit.config(**KINDS[kind])
    params, t, s = kit.params(c), 7, c.block_size
    features = kit.features(n=t)
    anchors = jnp.array([[0, 2, 6], [1, 4, 5]])
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, kit.V, (2, t)))
    inputs = network.slot_inputs(c, params.ends, jnp.take_along_axis(tokens, anchors, axis=1))
    together = kit.jit(lambda f: network.draft_text(c, params.network, inputs, f, anchors))(features)
    make = context_of(c, params, features, t + s)
    one = kit.jit(lambda x, length: network.draft_rows(c, params.network, x, make(length)))
    for i in range(3):
        alone = one(inputs[:, i], anchors[:, i])
        np.testing.assert_allclose(together[:, i], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ("sliding causal", "sliding"))
def test_sliding_layers_keep_a_ring(kind):
    """Over chunks of any length, a block's rows are those over the whole context."""
    c, n, m = kit.config(**KINDS[kind]), 24, 8
    own, features = kit.params(c), kit.features(n=n)
    drafter = BlockDrafter(c, chain(c), kit.HEADS["plain"], block=m)
    observe, make = kit.jit(drafter.observe), context_of(c, own, features, n)
    rows = kit.jit(lambda context, x: network.draft_rows(c, own.network, x, context))
    inputs = network.slot_inputs(c, own.ends, jnp.array([3, 4]))
    state, length, zeros = drafter.init(own, 2, n - m), np.zeros(2, int), jnp.zeros((2, m), jnp.int32)
    kept = [x.shape[2] for x in state.context.k]
    assert kept == [8 if kind == SLIDING else n for kind in c.layer_types]
    for counts in ((8, 3), (0, 8), (1, 4), (7, 1)):
        taps = features[np.arange(2)[:, None], (length[:, None] + np.arange(m))]
        order = jnp.broadcast_to(jnp.arange(m), (2, m))
        block = Committed(zeros, jnp.asarray(length), jnp.asarray(counts), zeros[:, 0], order, taps)
        state, length = observe(own, state, block), length + counts
        np.testing.assert_allclose(rows(state.context, inputs), rows(make(jnp.asarray(length)), inputs), atol=1e-5)


@pytest.mark.parametrize("kind", ("full", "block-causal", "sliding causal", "sliding"))
def test_rows_see_what_the_rule_says(kind):
    """By gradients: which context rows and which slots move slot i of a one-layer network."""
    layers = {k: v[:1] if isinstance(v, tuple) else v for k, v in KINDS[kind].items()}
    c = kit.config(**({"layer_types": (FULL,), "causal": (False,)} | layers))
    params, t, anchor, w = kit.params(c), 7, 5, c.sliding_window
    features, inputs = kit.features(1, t), jnp.asarray(np.random.default_rng(0).normal(0, 1, (1, 1, 5, kit.H)))
    run = lambda x, f: network.draft_text(c, params.network, x, f, jnp.array([[anchor]]))[0, 0]  # noqa: E731
    by_slot, by_feature = kit.jit(jax.jacobian(lambda x, f: (run(x, f) ** 2).sum(-1), (0, 1)))(inputs, features)
    slots = np.abs(by_slot[:, 0, 0]).max(-1) > 1e-9
    rows = np.abs(by_feature[:, 0]).max((-1, -2)) > 1e-9
    at = np.arange(5)
    apart = at[:, None] - at
    want = apart >= 0 if c.causal[0] else np.ones((5, 5), bool)
    want_rows = np.broadcast_to(np.arange(t) < anchor, (5, t))
    if w is not None and c.layer_types[0] == SLIDING:
        want = want & (np.abs(apart) < w)
        want_rows = want_rows & (anchor + at[:, None] - np.arange(t) < w)
    assert (slots == want).all() and (rows == want_rows).all()


def test_the_published_rule_for_causal_layers():
    mixed = (SLIDING,) * 5 + (FULL,)
    assert causal_layers(mixed, None) == (True,) * 5 + (False,)
    assert causal_layers(mixed, False) == (False,) * 6
    assert causal_layers(mixed, True) == (True,) * 6


def test_default_layers_are_the_published_ones():
    as_ids = lambda *sizes: [tap - 1 for tap in default_taps(*sizes)]  # noqa: E731
    assert as_ids(36, 5) == [1, 9, 17, 25, 33]
    assert as_ids(32, 5) == [1, 8, 15, 22, 29]
    assert as_ids(40, 5) == [1, 10, 19, 28, 37]
    assert as_ids(36, 1) == [18]


def test_random_convolutions_start_as_the_identity():
    plain, convolved = kit.config(), kit.config(conv_kernel_size=2, conv_group_size=8)
    own = network.init_network(convolved, jax.random.key(0))
    bare = [dataclasses.replace(layer, attention_conv=None, mlp_conv=None) for layer in own.layers]
    x, f, at = jnp.ones((1, 1, 5, kit.H)), kit.features(1), jnp.array([[3]])
    got = kit.jit(lambda x: network.draft_text(convolved, own, x, f, at))(x)
    want = kit.jit(lambda x: network.draft_text(plain, dataclasses.replace(own, layers=tuple(bare)), x, f, at))(x)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_wrong_settings_are_refused():
    for change, name in (
        ({"mask_token": kit.V}, "mask_token"),
        ({"block_size": 1}, "block_size"),
        ({"layer_types": (SLIDING, FULL)}, "sliding_window"),
        ({"causal": (True,)}, "causal"),
        ({"conv_kernel_size": 2}, "conv_group_size"),
        ({"draft_vocab_size": kit.V + 1}, "draft_vocab_size"),
        ({"taps": ()}, "taps"),
    ):
        with pytest.raises(ValueError, match=name):
            kit.config(**change)


def test_logits_are_scaled_and_bounded():
    c = kit.config(output_multiplier=0.5, softcap=2.0)
    params = kit.params(c)
    x = jnp.asarray(np.random.default_rng(0).normal(0, 1, (3, kit.H)), jnp.float32)
    want = 2 * np.tanh(0.5 * np.asarray(params.ends.logits(x)) / 2)
    np.testing.assert_allclose(network.base_logits(c, params, x), want, atol=1e-5)
    assert rms_norm(x, params.ends.norm, 1e-5).shape == params.ends.final(x, 1e-5).shape
