"""Views of a target: the same arrays, fewer layers or fewer bits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.models import views
from spec_jax.models.config import LlamaConfig
from spec_jax.models.linear import ByHead, Dense, Int8Dense, LoRA, Projection, quantize_int8
from spec_jax.models.llama import Layer, Llama, LlamaParams, stack_layers
from spec_jax.tree import Tree

CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=4
)


def params(seed=0):
    rng = np.random.default_rng(seed)
    array = lambda *shape: jnp.asarray(rng.normal(0, 0.3, shape), jnp.float32)  # noqa: E731
    dense = lambda i, o: Dense(array(i, o))  # noqa: E731

    def layer():
        return Layer(
            attention_norm=1 + array(16),
            q=dense(16, 16),
            k=dense(16, 8),
            v=dense(16, 8),
            o=dense(16, 16),
            mlp_norm=1 + array(16),
            gate=dense(16, 24),
            up=dense(16, 24),
            down=dense(24, 16),
        )

    return LlamaParams(array(16, 32), tuple(layer() for _ in range(4)), 1 + array(16), Dense(array(16, 32)))


@functools.partial(jax.jit, static_argnums=0)
def logits(target, params):
    tokens = jnp.asarray([[3, 1, 4, 1, 5]])
    tree = Tree(tokens, jnp.arange(-1, 4)[None], jnp.ones((1, 5), bool))
    return target.score(params, target.init_state(params, 1, 8), tree)[0].logits


def without(params, layer):
    """The parameters with a layer that adds nothing to its input."""
    zero = lambda d: jax.tree.map(jnp.zeros_like, d)  # noqa: E731
    old = params.layers[layer]
    idle = dataclasses.replace(old, o=zero(old.o), down=zero(old.down))
    return dataclasses.replace(params, layers=(*params.layers[:layer], idle, *params.layers[layer + 1 :]))


def test_a_skipped_layer_adds_nothing():
    target, whole = Llama(CONFIG, taps=(4,)), params()
    view, fewer = views.skip(target, whole, (1, 2))
    assert view.config.num_layers == 2 and view.taps == ()
    np.testing.assert_allclose(logits(view, fewer), logits(target, without(without(whole, 1), 2)), rtol=2e-5, atol=1e-5)
    assert abs(logits(view, fewer) - logits(target, whole)).max() > 0.05


def test_a_view_shares_its_arrays():
    target, whole = Llama(CONFIG), params()
    _, fewer = views.skip(target, whole, (0,))
    mine, theirs = jax.tree.leaves(fewer), {id(x) for x in jax.tree.leaves(whole)}
    assert len(mine) == len(theirs) - 9 and all(id(x) in theirs for x in mine)
    assert len(views.skip(target, whole, ())[1].layers) == 4


@pytest.mark.parametrize("left_out", [(), (1, 2), (0, 3)])
def test_a_mask_skips_the_layers_that_a_view_leaves_out(left_out):
    target, whole = Llama(CONFIG), params()
    keep = jnp.asarray([i not in left_out for i in range(4)])
    masked = jax.jit(lambda keep: logits(target, views.masked(whole, keep)))
    np.testing.assert_allclose(masked(keep), logits(*views.skip(target, whole, left_out)), atol=1e-5)
    assert masked.lower(keep).as_text().count("stablehlo.case") == 4, "a branch for every layer, not both sides of it"


def test_masks_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"keep: got shape \(3,\), takes \(4,\)"):
        views.masked(params(), jnp.ones(3, bool))
    with pytest.raises(ValueError, match="params: got stacked layers"):
        views.masked(stack_layers(params()), jnp.ones(4, bool))


def test_int8_rounds_the_dense_maps_and_shares_the_rest():
    target, whole = Llama(CONFIG), params()
    lora = LoRA(whole.layers[0].q, jnp.ones((16, 2)), jnp.ones((2, 16)), jnp.float32(0.1))
    whole = dataclasses.replace(whole, layers=(dataclasses.replace(whole.layers[0], q=lora), *whole.layers[1:]))
    low = views.int8(whole)
    assert isinstance(low.layers[1].up, Int8Dense) and isinstance(low.head, Int8Dense)
    assert isinstance(low.layers[0].q, LoRA) and isinstance(low.layers[0].q.base, Int8Dense)
    assert low.layers[0].q.a is lora.a and low.embedding is whole.embedding and low.norm is whole.norm
    error = abs(logits(target, low) - logits(target, whole)).max()
    assert 0 < error < 0.3
    assert views.int8(low).layers[1].up.kernel is low.layers[1].up.kernel
    tied = dataclasses.replace(whole, head=None)
    assert views.int8(tied).head is None


def test_int8_of_stacked_layers_is_that_of_each():
    target, whole = Llama(CONFIG), params()
    low, stacked = views.int8(whole), views.int8(stack_layers(whole))
    for a, b in zip(jax.tree.leaves(stack_layers(low).layers), jax.tree.leaves(stacked.layers), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(logits(target, stacked), logits(target, low), atol=1e-5)


def test_int8_of_einsum_kernels_is_that_of_the_dense_ones():
    """Other libraries' layouts: several input axes, a bias and a LoRA pair, heads of one of several stacked kernels."""
    rng, whole = np.random.default_rng(1), params()
    draw = lambda *shape: jnp.asarray(rng.normal(0, 0.3, shape), jnp.float32)  # noqa: E731
    pair = {"a": draw(4, 4, 2), "b": draw(2, 16)}
    o = Projection(draw(4, 4, 16), draw(16), **pair, inputs=2, scale=0.5)
    k = ByHead(draw(2, 2, 16, 4), 1)
    low = views.int8(dataclasses.replace(whole, layers=(dataclasses.replace(whole.layers[0], o=o, k=k),))).layers[0]
    x = draw(5, 16)
    dense = quantize_int8(Dense(o.kernel.reshape(16, 16), o.bias))
    update = LoRA(dense, pair["a"].reshape(16, 2), pair["b"], jnp.float32(0.5))
    by_head = quantize_int8(Dense(k.kernel[1].swapaxes(0, 1).reshape(16, 8)))
    for got, want, old in ((low.o, update, o), (low.k, by_head, k)):
        assert got.kernel.dtype == jnp.int8 and got.kernel.size == 16 * got(x).shape[1]
        np.testing.assert_allclose(got(x), want(x), rtol=1e-5, atol=1e-5)
        assert 0 < abs(got(x) - old(x)).max() < 0.1
        assert got(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
        assert quantize_int8(got) is got


def test_layers_that_are_none_are_refused():
    target, whole = Llama(CONFIG), params()
    for wrong in ((4,), (-1,), range(4)):
        with pytest.raises(ValueError, match="layers: got"):
            views.skip(target, whole, wrong)
    with pytest.raises(ValueError, match="params: got stacked layers"):
        views.skip(target, stack_layers(whole), (1,))


def test_a_window_is_all_that_a_windowed_view_sees():
    target, whole = Llama(CONFIG, taps=(4,)), params()
    view = views.windowed(target, 2)
    assert view.taps == ()
    parent = jnp.arange(-1, 4)[None]
    run = lambda model, tokens: model.score(  # noqa: E731
        whole, model.init_state(whole, 1, 8), Tree(jnp.asarray([tokens]), parent, jnp.ones((1, 5), bool))
    )[0].logits[0, -1]
    one, other = [3, 1, 4, 1, 5], [9, 1, 4, 1, 5]  # a window of 2 in four layers reaches five tokens back
    np.testing.assert_allclose(
        run(views.windowed(target, 1), one), run(views.windowed(target, 1), [0, 0, 0, 0, 5]), atol=1e-5
    )
    assert (
        np.abs(run(view, one) - run(target, one)).max() > 1e-3 and np.abs(run(view, one) - run(view, other)).max() > 0
    )
    with pytest.raises(ValueError, match="target: got one with a window of 2"):
        views.windowed(view, 2)
    with pytest.raises(ValueError, match="tokens: got 0"):
        views.windowed(target, 0)
