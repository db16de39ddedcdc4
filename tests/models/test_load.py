"""Which form a loaded model's layers have, and that it is the same model."""

import jax
import numpy as np
import pytest

from spec_jax.models import layers
from spec_jax.models.layers import Periods
from spec_jax.models.load import load_target
from tests.models import qwen_kit as kit
from tests.models.test_qwen import MTP, write


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return write(tmp_path_factory.mktemp("hybrid"), MTP, kit.random_tensors(MTP))


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_layers_are_stacked_where_a_scan_costs_no_copy(kind, hybrid, write_directory, monkeypatch):
    path = hybrid if kind == "hybrid" else write_directory()
    apart = load_target(path, stacked=False).params
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
