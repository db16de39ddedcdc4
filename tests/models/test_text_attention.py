"""Attention over whole texts in blocks of queries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.models import gated_attention, text_attention
from tests.models import qwen_kit as kit


@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_blocks_equal_one_masked_product(window, monkeypatch):
    monkeypatch.setattr(text_attention, "_ROWS", 7)
    _, params = kit.small()
    mixer, (b, t) = params.layers[1].mixer, (2, 30)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(b, t, 32)), jnp.float32)
    got, rows = text_attention.attend_text(kit.HYBRID, mixer, x, window)
    q, want = gated_attention.project(kit.HYBRID, mixer, x, jnp.broadcast_to(jnp.arange(t), (b, t)), t)
    out = jax.nn.dot_product_attention(
        q,
        want.k.swapaxes(1, 2),
        want.v.swapaxes(1, 2),
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
    )
    np.testing.assert_allclose(got, gated_attention.combine(mixer, x, out), atol=1e-5)
    np.testing.assert_array_equal(rows.k, want.k)
