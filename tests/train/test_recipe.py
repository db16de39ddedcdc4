import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from spec_jax.drafters.block.config import FULL, SLIDING
from spec_jax.drafters.block.heads.gru import Domino
from spec_jax.drafters.block.heads.head import Plain
from spec_jax.drafters.block.heads.markov import Markov
from spec_jax.drafters.load import load_drafter
from spec_jax.models.load import LoadedTarget
from spec_jax.train import block, features
from spec_jax.train import step as steps
from spec_jax.train.block import BlockForward
from spec_jax.train.block_recipe import HEADS, BlockRecipe
from spec_jax.train.kinds import EagleRecipe, MedusaRecipe, ParallelRecipe
from spec_jax.train.objective import Objective
from spec_jax.train.recipe import Recipe
from spec_jax.train.task import Task
from tests.drafters import hybrid
from tests.train import toy

RECIPES = sorted((Path(__file__).parents[2] / "scripts" / "drafting" / "recipes").glob("*.toml"))
SMOLLM2 = dataclasses.replace(
    toy.CONFIG, vocab_size=49152, hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64
)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipes_of_ours_are_recipes(path):
    recipe = Recipe.load(path)
    forward = recipe.drafter.forward(hybrid.config() if recipe.kind == "mtp" else SMOLLM2)  # one with such a head
    assert forward.slots >= 3
    assert recipe.training.decay < recipe.training.steps and max(forward.taps, default=0) <= 30
    assert hash(forward) is not None
    if recipe.objective.base_until or recipe.objective.confidence:
        assert isinstance(forward, BlockForward) and not isinstance(forward.head, Plain)


def test_a_drafter_that_reads_what_was_rejected_is_asked_again():
    again = {path.stem for path in RECIPES if Recipe.load(path).training.labels == "again"}
    assert again == {"carryover_hybrid", "retrace_hybrid"}
    assert again == {p.stem for p in RECIPES if getattr(Recipe.load(p).drafter, "rejected", None)}


def test_a_parallel_model_is_one_of_two():
    forward = ParallelRecipe(layers=1).forward(toy.CONFIG)
    assert (forward.config.model.num_layers, forward.config.mask_token, forward.slots) == (1, toy.V - 1, 8)
    for given in ({}, {"layers": 1, "model": "small_hybrid"}):
        with pytest.raises(ValueError, match="model, layers: got"):
            ParallelRecipe(**given).forward(toy.CONFIG)
    with pytest.raises(ValueError, match="model: got one of vocab_size"):
        ParallelRecipe(model="small_hybrid").forward(toy.CONFIG)
    with pytest.raises(ValueError, match="layers: got 3, takes 1 .. 2"):
        ParallelRecipe(layers=3).forward(toy.CONFIG)


def test_hydras_layer_has_the_targets_sizes():
    forward = MedusaRecipe(sequential=True, prefix=True).forward(toy.CONFIG)
    layer = forward.config.prefix
    assert (layer.num_layers, layer.hidden_size, layer.num_heads) == (1, 16, toy.CONFIG.num_heads)
    with pytest.raises(ValueError, match="prefix is 'a layer'"):
        MedusaRecipe(prefix=True).forward(toy.CONFIG)


def test_there_are_recipes():
    assert len(RECIPES) >= 4


def test_a_recipe_follows_the_target():
    config = BlockRecipe(layers=1, block_size=5).config(toy.CONFIG)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (24, 16, 32)
    assert config.mask_token == 23 and config.taps == (2,) and config.layer_types == (FULL,)
    assert config.causal == (False,) and config.depth == 4
    other = BlockRecipe(sliding_window=8, taps=(1, 2), is_causal=None, slots="shifted", block_size=5).config(toy.CONFIG)
    assert other.layer_types == (SLIDING,) and other.causal == (True,) and other.depth == 5


def test_heads_have_their_settings():
    assert BlockRecipe(head="markov", head_settings={"rank": 8}).make_head() == Markov(rank=8)
    assert BlockRecipe(head="domino").make_head() == Domino()
    with pytest.raises(ValueError, match="head: got 'gru', takes one of plain, markov"):
        BlockRecipe(head="gru").make_head()
    with pytest.raises(ValueError, match="head_settings: got \\['low'\\], takes some of"):
        BlockRecipe(head="markov", head_settings={"low": 8}).make_head()


def test_layers_may_differ():
    kinds, flags = (FULL, SLIDING, FULL), (False, True, True)
    config = BlockRecipe(layers=3, layer_types=kinds, is_causal=flags, sliding_window=8).config(SMOLLM2)
    assert (config.layer_types, config.causal, config.sliding_window) == (kinds, flags, 8)
    config = BlockRecipe(layers=2, layer_types=(FULL, SLIDING), sliding_window=8).config(SMOLLM2)
    assert config.causal == (False, True)


STEPPED = {
    "per_layer_features, layer_types": (
        BlockRecipe(
            layers=2,
            block_size=4,
            taps=(1, 2),
            layer_types=(FULL, SLIDING),
            is_causal=(True, False),
            sliding_window=3,
            per_layer_features=True,
        ),
        lambda new: new.network.mix[1],
    ),
    "bigram": (
        BlockRecipe(block_size=4, head="bigram", head_settings={"successors": 3}),
        lambda new: new.network.fc.kernel,
    ),
    "feature_norm, norm_before_residual": (
        EagleRecipe(slots=2, taps=(1, 2), feature_norm="each", norm_before_residual=True),
        lambda new: new.network.feature_norms[1],
    ),
}


@pytest.mark.parametrize("name", STEPPED)
def test_a_step_of_training_with_a_setting(tmp_path, name):
    """The step moves what the setting adds, and the drafter is read back with the setting and what was learnt."""
    recipe, part = STEPPED[name]
    forward, weights = recipe.forward(toy.CONFIG), toy.params()
    shared = {block.TABLE: forward.counted([[1, 2, 3], [1, 2, 5]])} if name == "bigram" else None
    task = Task(forward, features.with_last(forward.tapped(toy.target()), toy.LAYERS), Objective(), 4, 10)

    @jax.jit
    def run(key, batch):
        begin = forward.init(key, batch.target)
        optimizer = steps.adamw(begin)
        return begin, *steps.make_step(task.loss, optimizer)(steps.init(begin, optimizer), batch, 1e-2)

    begin, state, metrics = run(jax.random.key(0), toy.batch(weights=weights, shared=shared))
    assert np.isfinite(metrics["loss"]) and np.abs(part(state.params) - part(begin)).max() > 1e-4
    whole = forward.as_drafter(state.params, weights, shared)
    forward.save(tmp_path, whole, "toy")
    loaded = load_drafter(tmp_path, LoadedTarget(toy.target(()), weights, None, (), 64))
    assert loaded.parts["network"] == forward.config and loaded.parts.get("head") == getattr(forward, "head", None)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, whole)
    if name == "bigram":
        np.testing.assert_array_equal(loaded.params.head.successors[1:3], [[2, -1, -1], [3, 5, -1]])
        with pytest.raises(ValueError, match="shared: got no n-gram table, takes one as 'table'"):
            forward.as_drafter(state.params, weights)


@pytest.mark.parametrize("name", HEADS)
def test_every_head_is_there(name):
    import importlib

    module, made = HEADS[name].split(".")
    assert hasattr(importlib.import_module(f"spec_jax.drafters.block.heads.{module}"), made)


def test_a_file_may_leave_things_out(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text("[training]\nsteps = 7\ndecay = 3\n[objective]\ndivergences = {ce = 0.5, tv = 0.5}\n")
    recipe = Recipe.load(path)
    assert recipe.training.steps == 7 and recipe.drafter == BlockRecipe()
    assert recipe.objective.divergences == (("ce", 0.5), ("tv", 0.5))
    described = recipe.describe()
    assert "held_out" not in described and "measure_every" not in described["training"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trainin]\nsteps = 7", "config: got \\['trainin'\\], takes tables of"),
        ("[training]\nstep = 7", "training: got \\['step'\\], takes some of anchors"),
        ("[objective]\nweight = 7", "objective: got \\['weight'\\]"),
        ("[training", "is no TOML"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Recipe.load(path)
    with pytest.raises(FileNotFoundError, match="is no file"):
        Recipe.load(tmp_path / "none.toml")
