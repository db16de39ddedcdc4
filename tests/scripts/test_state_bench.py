"""bench.py state: bytes of staged factors and of snapshots, and rooflines, for published sizes."""

import pytest

from scripts.benches import state


@pytest.fixture(scope="module")
def models():
    return {name: state.count(model, state.TREES) for name, model in state.MODELS.items()}


@pytest.mark.parametrize(("name", "layers", "value_heads"), [("Qwen3.5-35B", 30, 32), ("Qwen3.5-397B", 45, 64)])
def test_bytes_are_those_of_the_formulas(models, name, layers, value_heads):
    """k in bfloat16 with its norm, u and decay in float32; a state of 128 x 128 per value head."""
    model = models[name]
    assert model["layers"] == layers
    factor = 16 * 128 * 2 + 16 * 4 + value_heads * 128 * 4 + value_heads * 4
    assert model["factor_kib_per_node"] == factor / 1024
    assert model["snapshot_kib_per_node"] == value_heads * 128 * 128 * 4 / 1024
    assert model["conv_kib_per_node"] == (2 * 16 + value_heads) * 128 * 2 / 1024
    for s in model["sequences"]:
        assert s["factors_mib"] == pytest.approx(layers * s["n"] * factor / 2**20)


def test_a_node_of_the_35b_model_is_small(models):
    assert models["Qwen3.5-35B"]["factor_kib_per_node"] <= 20.2


def test_factors_win_from_two_nodes(models):
    for model in models.values():
        for s in model["sequences"]:
            for times in s["microseconds"].values():
                assert (times["factors"] < times["snapshots"]) == (s["n"] > 1)
