"""How models lie on a mesh: every array's axes, what stays whole, and meshes that can't be made."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from spec_jax.models import delta_mixer, on_mesh, partition, placement, qwen_tensors
from spec_jax.models.layers import Periods
from spec_jax.models.linear import Dense, LoRA, Projection, RowEmbedding, transposed
from spec_jax.models.llama import Llama
from spec_jax.models.partition import param_specs, state_specs
from spec_jax.models.placement import make_mesh
from spec_jax.models.qwen import stack_layers
from spec_jax.models.qwen_config import ATTENTION, DELTA
from spec_jax.models.views import int8
from tests.drafters.hybrid import config, hybrid
from tests.models.test_llama import small

SIZES = {"num_heads": 4, "num_kv_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "vocab_size": 32}
BIG = {"num_heads": 32, "num_kv_heads": 2, "linear_num_key_heads": 16, "linear_num_value_heads": 64}


def mesh(data=1, expert=1, tensor=1):
    return AbstractMesh((data, expert, tensor), placement.AXES)


@functools.cache
def mixed():
    return hybrid((DELTA, ATTENTION) * 2, **SIZES)


def test_meshes_that_can_not_be_made():
    there = len(jax.devices())
    assert dict(make_mesh({}).shape) == {"data": 1, "expert": 1, "tensor": 1}
    with pytest.raises(ValueError, match="tensor 3: .* devices, takes a product of at most the 2 there are"):
        make_mesh({"tensor": 3}, jax.devices() * 2 if there == 1 else jax.devices()[:2])
    with pytest.raises(ValueError, match="'model', takes data, expert, tensor"):
        make_mesh({"model": 1})
    with pytest.raises(ValueError, match="data: got 0, takes an integer from 1"):
        make_mesh({"data": 0})
    with pytest.raises(ValueError, match="mesh: got none"):
        param_specs(*mixed())


def test_a_hybrid_is_split_by_heads_experts_and_vocabulary():
    target, params = mixed()
    specs = param_specs(target, params, mesh(2, 2, 2))
    delta, attention = (layer.mixer for layer in specs.layers[:2])
    columns, rows = P(None, "tensor"), P("tensor")
    for leaf in (delta.qkv, delta.z, attention.q, attention.k, attention.v):
        assert leaf.kernel == columns
    assert delta.b == delta.a == delta.conv == columns
    assert attention.gate.kernel == columns and attention.o.kernel == delta.out.kernel == rows
    assert delta.a_log == delta.dt_bias == rows and delta.norm == attention.q_norm == P()
    experts = specs.layers[0].mlp
    assert experts.gate == experts.up == P("expert", None, "tensor") and experts.down == P("expert", "tensor")
    assert experts.shared.up.kernel == columns and experts.shared.down.kernel == rows
    assert experts.router == experts.shared_gate == specs.norm == specs.mtp.fc.kernel == P()
    assert specs.embedding == specs.head.kernel == columns and specs.mtp.layer.mixer.o.kernel == rows
    assert jax.tree.structure(specs) == jax.tree.structure(params)


def test_stacked_layers_have_one_axis_more_and_shapes_will_do():
    target, params = mixed()
    stacked = jax.eval_shape(lambda p: stack_layers(target.config, p), params)
    specs = param_specs(target, stacked, mesh(1, 2, 2))
    assert isinstance(specs.layers, Periods)
    first = specs.layers.stacked[0]
    assert first.mixer.qkv.kernel == P(None, None, "tensor") and first.mixer.a_log == P(None, "tensor")
    assert first.mlp.down == P(None, "expert", "tensor") and first.mlp.shared.down.kernel == P(None, "tensor")


def test_leaves_of_every_kind():
    on = mesh(1, 1, 2)
    target, params = small()
    (layer, *_), draw = params.layers, jnp.zeros
    hidden, inner = layer.up.kernel.shape
    up = LoRA(layer.up, draw((hidden, 2)), draw((2, inner)), jnp.float32(1))
    down = LoRA(Dense(layer.down.kernel, draw(hidden)), draw((inner, 2)), draw((2, hidden)), jnp.float32(1))
    q = Projection(draw((hidden, 4, 8)), draw(32), draw((hidden, 2)), draw((2, 4, 8)))
    o = Projection(draw((4, 8, hidden)), None, draw((4, 8, 2)), draw((2, hidden)), inputs=2)
    layer = dataclasses.replace(layer, up=up, down=down, q=q, o=o)
    specs = param_specs(target, dataclasses.replace(params, layers=(layer,)), on).layers[0]
    columns, rows = P(None, "tensor"), P("tensor")
    assert (specs.up.base.kernel, specs.up.a, specs.up.b, specs.up.scale) == (columns, P(), columns, P())
    assert (specs.down.base.kernel, specs.down.a, specs.down.b) == (rows, rows, P())
    assert specs.down.base.bias == P()  # added once, behind the sum
    assert (specs.q.kernel, specs.q.bias, specs.q.a, specs.q.b) == (columns, rows, P(), columns)
    assert (specs.o.kernel, specs.o.a, specs.o.b) == (rows, rows, P())
    eight = param_specs(target, int8(params), on).layers[0]
    assert eight.up.scale == eight.down.kernel == rows and eight.down.scale == P()
    turned = param_specs(target, transposed(params, jnp.transpose), on).layers[0]
    assert turned.up.weight == rows and turned.down.weight == columns


def test_vocabularies_that_an_axis_does_not_divide_stay_whole():
    target, params = small()  # 61 tokens
    assert param_specs(target, params, mesh(tensor=2)).embedding == P()
    even = Llama(dataclasses.replace(target.config, vocab_size=62))
    table = RowEmbedding(jnp.zeros((62, 32)), jnp.float32)
    specs = param_specs(even, dataclasses.replace(params, embedding=table), mesh(tensor=2))
    assert specs.embedding.table == P("tensor")
    assert partition.whole_parts(target.config, mesh(tensor=2)) == ("vocab (vocab_size 61, tensor 2)",)


def test_key_value_heads_fewer_than_devices():
    big = config(**BIG)
    split = partition.split_of(big, mesh(tensor=8))
    assert (split.heads, split.held, split.kv, split.delta) == (True, 8, False, True)
    inside = on_mesh.local_config(big, mesh(tensor=8))
    assert (inside.num_heads, inside.num_kv_heads) == (4, 1)
    assert (inside.linear_num_key_heads, inside.linear_num_value_heads) == (2, 8)
    odd = partition.split_of(big, mesh(tensor=5))
    assert (odd.heads, odd.held, odd.delta) == (False, 2, False)


def test_states_are_split_by_rows_and_heads():
    target, params = mixed()
    shapes = jax.eval_shape(lambda: target.init_state(params, 8, 24))
    specs = state_specs(target, shapes, mesh(2, 2, 2))
    rows, (delta, attention) = ("data", "expert"), specs.layers[:2]
    assert attention.k == attention.v == delta.recurrent == delta.pending.u == P(rows, "tensor")
    assert delta.conv == delta.pending.k == delta.pending.k_norm == P(rows, None, "tensor")
    assert delta.pending.weight == delta.pending.decay == P(rows, "tensor") and specs.length == P(rows)
    uneven = state_specs(target, jax.eval_shape(lambda: target.init_state(params, 6, 24)), mesh(2, 2, 2))
    assert uneven.length == P("data") and uneven.layers[1].k == P("data", "tensor")
    one = state_specs(target, jax.eval_shape(lambda: target.init_state(params, 1, 24)), mesh(2, 2, 2))
    assert one.length == P() and one.layers[0].recurrent == P(None, "tensor")


def test_a_devices_channels_are_those_of_its_heads():
    """The delta projection's columns on each of two devices are the queries, keys and values of its key heads."""
    target, params = mixed()
    c, mixer = target.config, params.layers[0].mixer
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, c.hidden_size)), jnp.float32)
    rows = delta_mixer.gates(c, mixer, x, delta_mixer.channels(mixer, x))
    halves = [slice(0, c.conv_size // 2), slice(c.conv_size // 2, None)]
    own = dataclasses.replace(c, linear_num_key_heads=1, linear_num_value_heads=2)
    for i, columns in enumerate(halves):
        part = dataclasses.replace(mixer, qkv=Dense(mixer.qkv.kernel[:, columns]))
        gates = {n: getattr(mixer, n)[..., 2 * i : 2 * i + 2] for n in ("a", "b", "a_log", "dt_bias")}
        part = dataclasses.replace(part, **gates)
        got = delta_mixer.gates(own, part, x, delta_mixer.channels(part, x))
        np.testing.assert_allclose(got.k[:, :, 0], rows.k[:, :, i], rtol=1e-5)
        np.testing.assert_allclose(got.v, rows.v[:, :, 2 * i : 2 * i + 2], rtol=1e-5)
        np.testing.assert_allclose(got.decay, rows.decay[:, :, 2 * i : 2 * i + 2], rtol=1e-5)
    tensors = qwen_tensors.to_tensors(c, params)
    back = qwen_tensors.from_tensors(c, tensors).layers[0].mixer
    np.testing.assert_array_equal(back.conv, mixer.conv)
