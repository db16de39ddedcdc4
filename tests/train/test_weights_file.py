import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.models.linear import Dense
from spec_jax.train import weights_file

PARAMS = {
    "layers": (Dense(jnp.arange(6.0).reshape(2, 3)), Dense(jnp.ones((3, 1)), jnp.zeros(1))),
    "kept": jnp.arange(4),
    "none": None,
}


def test_arrays_come_back_under_their_names(tmp_path):
    path = tmp_path / "deep" / "drafter.safetensors"
    weights_file.save(path, PARAMS, {"steps": 5, "data": "x"})
    found = weights_file.load(path, jax.eval_shape(lambda: PARAMS))
    assert jax.tree.structure(found) == jax.tree.structure(PARAMS)
    jax.tree.map(np.testing.assert_array_equal, found, PARAMS)
    assert weights_file.about(path) == {"steps": 5, "data": "x"}


def test_half_the_size_on_disk(tmp_path):
    big = {"w": jnp.linspace(-1, 1, 5000), "kept": jnp.arange(4)}
    weights_file.save(tmp_path / "w", big, {}, np.float16)
    assert (tmp_path / "w").stat().st_size < 11_000
    found = weights_file.load(tmp_path / "w", big)
    assert found["w"].dtype == jnp.float32 and found["kept"].dtype == jnp.int32
    np.testing.assert_allclose(found["w"], big["w"], atol=1e-3)


def test_what_does_not_fit_is_named(tmp_path):
    weights_file.save(tmp_path / "w", {"a": jnp.zeros(2), "b": jnp.zeros(3)}, {})
    with pytest.raises(ValueError, match=r"left over b; missing c"):
        weights_file.load(tmp_path / "w", {"a": jnp.zeros(2), "c": jnp.zeros(3)})
    with pytest.raises(ValueError, match=r"a \(2,\), not \(4,\)"):
        weights_file.load(tmp_path / "w", {"a": jnp.zeros(4), "b": jnp.zeros(3)})
    with pytest.raises(FileNotFoundError, match="path: "):
        weights_file.load(tmp_path / "v", {})
