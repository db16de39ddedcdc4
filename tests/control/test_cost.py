"""Cost models: the table that a compiler gave, and what a controller makes of it."""

import jax.numpy as jnp
import pytest

from spec_jax.control.cost import CostModel, compiled_shapes
from spec_jax.control.throughput import Throughput
from spec_jax.tree import Draft, Tree

SHAPES = compiled_shapes()


@pytest.mark.parametrize("key", SHAPES)
def test_every_compiled_shape_is_a_cost_model(key):
    name, topology = SHAPES[key]["name"], SHAPES[key]["topology"]
    model = CostModel.from_compiler(name, topology)
    assert model.nodes[0] == 1 and 16 in model.nodes
    assert list(model.seconds) == [SHAPES[key]["rounds"][str(n)]["seconds"] for n in model.nodes]
    assert model.seconds[-1] > model.seconds[0]


def test_the_largest_hybrid_fits_its_pod_at_sixteen_nodes():
    rounds = SHAPES["Qwen3.5-397B-A17B v5e:16x16"]["rounds"]
    assert rounds["16"]["hbm_gib"] <= 16


@pytest.mark.parametrize("pair", [("Qwen3-9B", "v5e:2x2"), ("Qwen3-8B", "v5e:4x4"), ("", "")])
def test_an_unknown_pair_is_refused_with_those_there_are(pair):
    with pytest.raises(ValueError, match=r"name, topology: got \(.*takes one of .*\(Qwen3-8B, v5e:2x2\)"):
        CostModel.from_compiler(*pair)


def test_a_controller_weighs_by_it():
    """Sure drafts are worth the widest width, hopeless ones none, at a pod's costs."""
    widths, controller = (1, 4, 16), Throughput()
    cost = CostModel.from_compiler("Qwen3-8B", "v5e:2x2").at(widths)
    parent = jnp.arange(16)[None] - 1
    tree = Tree(jnp.zeros((1, 16), jnp.int32), parent, jnp.ones((1, 16), bool))
    for confidence, width in ((1.0, 16), (0.001, 1)):
        draft = Draft(tree, jnp.full((1, 16), confidence).at[:, 0].set(1.0))
        chosen = controller.decide(controller.init(1), draft, jnp.ones(1, bool), cost, widths)
        assert widths[int(chosen)] == width
