"""Hydra++'s layer in front of the heads: the formulas of a decoder layer, in numpy, over whole texts."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.drafters import prefix_attention
from spec_jax.drafters.medusa import MedusaConfig
from tests.drafters.block import kit
from tests.drafters.eagle import kit as heads
from tests.faults.kit import jit

CONFIG = heads.CONFIGS["hydra++"]


def formulas(c, prefix, hidden):
    """The layer and its norm over one text [t, hidden]."""
    layer, (t, _) = prefix.layer, hidden.shape
    rms = lambda x, w: x / np.sqrt((x * x).mean(-1, keepdims=True) + c.rms_norm_eps) * np.asarray(w)  # noqa: E731
    split = lambda x: x.reshape(t, -1, c.head_dim)  # noqa: E731
    half = c.head_dim // 2
    angle = np.arange(t)[:, None] * c.rope.theta ** (-np.arange(half) / half)

    def turned(x):
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    w = {name: np.asarray(getattr(layer, name).kernel) for name in ("q", "k", "v", "o", "gate", "up", "down")}
    x = rms(hidden, layer.attention_norm)
    q, k, v = turned(split(x @ w["q"])), turned(split(x @ w["k"])), split(x @ w["v"])
    out = np.zeros_like(q)
    for i in range(t):
        for head in range(c.num_heads):
            group = head * c.num_kv_heads // c.num_heads
            score = k[: i + 1, group] @ q[i, head] / np.sqrt(c.head_dim)
            weight = np.exp(score - score.max())
            out[i, head] = weight @ v[: i + 1, group] / weight.sum()
    hidden = hidden + out.reshape(t, -1) @ w["o"]
    x = rms(hidden, layer.mlp_norm)
    gate = x @ w["gate"]
    return rms(hidden + (gate / (1 + np.exp(-gate)) * (x @ w["up"])) @ w["down"], prefix.norm)


def test_the_layer_is_the_formulas():
    prefix, rng = heads.params(CONFIG).prefix, np.random.default_rng(0)
    hidden = rng.normal(0, 1, (2, 7, kit.H)).astype(np.float32)
    got = jit(lambda prefix, hidden: prefix_attention.text(CONFIG.prefix, prefix, hidden))(prefix, jnp.asarray(hidden))
    want = [formulas(CONFIG.prefix, prefix, row) for row in hidden]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_layers_that_do_not_fit_are_named():
    for change, message in (
        ({"num_layers": 2}, "prefix is 'one with num_layers 2'; taken: 1"),
        ({"hidden_size": 32}, "prefix is 'one of hidden_size 32'; taken: one of 16"),
        ({"mlp_bias": True}, "prefix is 'one with mlp_bias True'"),
        ({"sliding_window": 8}, "prefix is 'one with sliding_window 8'; taken: None"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(CONFIG, prefix=dataclasses.replace(CONFIG.prefix, **change))
    with pytest.raises(ValueError, match="prefix is 'a layer'; taken: None where the heads are not sequential"):
        MedusaConfig(kit.V, kit.H, prefix=CONFIG.prefix)
