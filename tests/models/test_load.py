"""Which form a loaded model's layers have, and that it is the same model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.models import layers
from spec_jax.models.layers import Periods
from spec_jax.models.linear import Dense, RowEmbedding, TransposedDense, straight
from spec_jax.models.load import load_target
from spec_jax.models.orbax_weights import save_orbax
from tests.models import qwen_kit as kit
from tests.models.test_qwen import MTP, write


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return write(tmp_path_factory.mktemp("hybrid"), MTP, kit.random_tensors(MTP))


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_layers_are_stacked_where_a_scan_costs_no_copy(kind, hybrid, write_directory, monkeypatch):
    path = hybrid if kind == "hybrid" else write_directory()
    apart = load_target(path, stacked=False, transposed=False).params
    assert isinstance(apart.layers, tuple)
    for backend, form in (("cpu", tuple), ("tpu", Periods), ("gpu", Periods)):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        assert isinstance(load_target(path).params.layers, form)
    monkeypatch.undo()
    stacked = load_target(path, stacked=True).params
    assert isinstance(stacked.layers, Periods)
    got = [*layers.unstack(stacked.layers), stacked.embedding, stacked.norm]
    want = [*apart.layers, apart.embedding, apart.norm]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_kernels_are_transposed_for_a_cpu_alone(kind, hybrid, write_directory, monkeypatch, tmp_path):
    path = hybrid if kind == "hybrid" else write_directory()
    plain = load_target(path, stacked=False, transposed=False)
    loaded = load_target(path)
    assert isinstance(loaded.params.embedding, RowEmbedding)
    kinds = {type(x) for x in jax.tree.leaves(loaded.params, is_leaf=lambda x: isinstance(x, Dense | TransposedDense))}
    assert TransposedDense in kinds and Dense not in kinds
    assert loaded.params.embedding.shape == plain.params.embedding.shape
    equal(straight(loaded.params), plain.params)
    save_orbax(tmp_path / "saved", loaded.params, path)
    equal(load_target(tmp_path / "saved", transposed=False).params, plain.params)
    equal(load_target(tmp_path / "saved").params, loaded.params)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    equal(load_target(path, stacked=False).params, plain.params)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="transposed: got True with stacked layers or a mesh, takes it with neither"):
        load_target(path, stacked=True, transposed=True)


def test_transposed_kernels_give_the_same_products_and_columns():
    keys = jax.random.split(jax.random.key(0), 3)
    dense = Dense(jax.random.normal(keys[0], (16, 12)), jax.random.normal(keys[1], (12,)))
    turned = TransposedDense(dense.kernel.T, dense.bias)
    for rows in (1, 5):
        x = jax.random.normal(keys[2], (rows, 16))
        np.testing.assert_allclose(turned(x), dense(x), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(x @ RowEmbedding(turned.weight, jnp.float32), x @ dense.kernel, rtol=1e-5, atol=1e-5)
        gradient = jax.grad(lambda leaf, x: (leaf(x) ** 2).sum())
        np.testing.assert_allclose(gradient(turned, x).kernel, gradient(dense, x).kernel, rtol=1e-4, atol=1e-4)
    ids = jnp.asarray([[3, 0], [7, 3]])
    np.testing.assert_array_equal(turned.columns(ids), dense.columns(ids))
    embedding = RowEmbedding(turned.weight, jnp.float32)
    np.testing.assert_array_equal(np.asarray(embedding), dense.kernel)
    assert np.array(embedding).flags.writeable
    batched = jax.vmap(turned)(jnp.stack([x, 2 * x]))
    np.testing.assert_allclose(batched[1], dense(2 * x), rtol=1e-5, atol=1e-5)


def equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)
