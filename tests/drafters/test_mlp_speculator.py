"""The MLP speculator: its stages are the release's formulas, and its files are read as published."""

import dataclasses
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.drafters import medusa, mlp_speculator, mlp_speculator_files
from spec_jax.drafters.block.shape import BestFirst
from spec_jax.drafters.depth_tree import DepthTree
from spec_jax.drafters.files import read_directory, write_directory
from spec_jax.drafters.load import load_drafter
from spec_jax.drafters.mlp_speculator import MlpConfig, MlpHead
from spec_jax.models.checkpoint import CheckpointError
from spec_jax.topology.growth import Growth
from tests.drafters.block.kit import llama
from tests.drafters.eagle import kit
from tests.faults.kit import jit

TARGET = types.SimpleNamespace(target=llama()[0], params=llama()[1])
OWN = kit.CONFIGS["mlp_speculator"]
TIED = MlpConfig(kit.V, kit.H, num_stages=4, tie_weights=True, final_norm_eps=kit.EPS)
CONFIGS = {"own": OWN, "tied": TIED, "own as it is": dataclasses.replace(OWN, scale_input=False, inner_size=None)}


def tensors_of(config, folder):
    mlp_speculator_files.save(folder, config, kit.params(config), "somewhere")
    return read_directory(folder)


def formulas(config, tensors, hidden, tokens):
    """The release's forward in numpy, of a file's tensors: logits of every stage [stages, vocab]."""

    def tensor(kind, stage, part="weight"):
        last = {"proj": 1}.get(kind, 0) if config.tie_weights else stage
        return tensors[f"speculator.{kind}.{min(stage, last)}.{part}"]

    rms = lambda x: x / np.sqrt((x * x).mean() + 1e-6)  # noqa: E731
    gelu = lambda x: x * np.array([1 + math.erf(v / math.sqrt(2)) for v in x]) / 2  # noqa: E731
    n = config.num_stages
    inner = tensors["speculator.proj.0.weight"].shape[0]
    state_weight = 0.5 ** (0.5 / n)
    emb_weight = math.sqrt(1 - state_weight**2)
    state, found = rms(hidden) / math.sqrt(2) if config.scale_input else hidden, []
    for i in range(n):
        z = tensor("emb", i)[tokens[i]] * emb_weight * math.sqrt(inner / 2)
        state = tensor("proj", i) @ state * state_weight + z
        state = gelu(tensor("ln", i) * rms(state) + tensor("ln", i, "bias"))
        found.append(tensor("head", i) @ state)
    return np.stack(found)


@pytest.mark.parametrize("name", CONFIGS)
def test_drafted_and_trained_logits_are_the_formulas(name, tmp_path):
    """On a branching draft: nodes 1 and 2 are below the root, each later level has one node below each."""
    config, own = CONFIGS[name], kit.params(CONFIGS[name])
    n, rng = config.num_stages, np.random.default_rng(1)
    _, tensors = tensors_of(config, tmp_path)
    features = jnp.asarray(rng.normal(0, 2, (1, 4, 1, kit.H)), jnp.float32)
    text, two = jnp.asarray(rng.integers(0, kit.V, (1, 4))), rng.integers(0, kit.V, (2, n))
    hidden = np.asarray(own.ends.final(features[0, 1, 0], kit.EPS))
    want = [formulas(config, tensors, hidden, [int(text[0, 2]), *path]) for path in two]
    anchors, blocks = jnp.array([[2, 2, 0]]), jnp.asarray(np.stack([*two, two[0]]))[None]
    shape = Growth(nodes=1 + 2 * n, depth=n, width=2, children=2)

    @jit
    def both(own, context):
        said = mlp_speculator.text_logits(config, own, features, text, anchors, blocks)[0]
        expander, weights, pool, logits = MlpHead(config).root(own, (), context, text[:, 2], shape)
        drafted, parent = [jnp.repeat(logits, 2, axis=0)], jnp.zeros((1, 2), jnp.int32)
        for i in range(1, n):
            pool, logits = expander.expand(weights, pool, parent, jnp.asarray(two[None, :, i - 1]))
            drafted.append(logits[0])
            parent = jnp.array([[2 * i - 1, 2 * i]])
        return said, jnp.stack(drafted, axis=1), pool.count

    said, drafted, count = both(own, jnp.asarray(hidden)[None])
    np.testing.assert_allclose(said[:2], want, rtol=1e-4, atol=1e-4)
    assert not said[2].any()  # nothing is before the text's first token
    np.testing.assert_allclose(drafted, want, rtol=1e-4, atol=1e-4)
    assert count == shape.expanded


def test_a_tied_file_may_hold_copies_and_nothing_else(tmp_path):
    fields, tensors = tensors_of(TIED, tmp_path)
    once = {f"speculator.{n}" for n in ("emb.0.weight", "proj.0.weight", "proj.1.weight", "head.0.weight")}
    assert set(tensors) == once | {"speculator.ln.0.weight", "speculator.ln.0.bias"}
    copies = {f"speculator.{n}.{i}.weight": tensors[f"speculator.{n}.0.weight"] for n in ("emb", "ln") for i in (1, 3)}
    copies |= {"speculator.proj.3.weight": tensors["speculator.proj.1.weight"]}
    write_directory(tmp_path, fields, {n.removeprefix("speculator."): x for n, x in (tensors | copies).items()})
    loaded = load_drafter(tmp_path, TARGET)
    assert loaded.drafter.head.config == TIED and loaded.drafter.depth == 4 and loaded.target.taps == (3,)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, kit.params(TIED))
    assert loaded.params.ends.embedding is llama()[1].embedding
    for name, like, change in (
        ("emb.2.weight", "emb.0.weight", 1),
        ("emb.4.weight", "emb.0.weight", 0),
        ("proj.2.weight", "proj.0.weight", 0),
        ("ln0.weight", "ln.0.weight", 0),
    ):
        wrong = tensors | {f"speculator.{name}": tensors[f"speculator.{like}"] + change}
        with pytest.raises(CheckpointError, match=f"unexpected tensors: speculator.{name}"):
            mlp_speculator_files.from_tensors("here", fields, wrong, *llama())
    with pytest.raises(CheckpointError, match="missing tensors: speculator.emb.1.weight, speculator.emb.2.weight"):
        mlp_speculator_files.from_tensors("here", fields | {"tie_weights": False}, tensors, *llama())
    both = tensors | {"emb.0.weight": tensors["speculator.emb.0.weight"]}
    with pytest.raises(CheckpointError, match="speculator.emb.0.weight is there by two names"):
        mlp_speculator_files.from_tensors("here", fields, both, *llama())


def test_configs_that_do_not_fit_are_named(tmp_path):
    fields, tensors = tensors_of(OWN, tmp_path)
    for change, message in (
        ({"vocab_size": 21}, "target is 'one of vocab_size 20'; taken: one of 21"),
        ({"emb_dim": 32}, "target is 'one of hidden_size 16'"),
        ({"emb_dim": None}, "emb_dim is None"),
        ({"inner_dim": 0}, "wrong tensors: speculator.emb.0.weight"),
        ({"inner_dim": -1}, "inner_dim is -1"),
        ({"n_predict": 1, "tie_weights": True}, "tie_weights is True; taken: false where num_stages is 1"),
        ({"scale_input": "yes"}, "scale_input is 'yes'"),
        ({"architectures": ["ArcticMLPSpeculatorPreTrainedModel"]}, "architectures is"),
    ):
        with pytest.raises(CheckpointError, match=message):
            mlp_speculator_files.from_tensors("here", fields | change, tensors, *llama())
    with pytest.raises(ValueError, match="shape is 'one of depth 4'; taken: at most 3"):
        kit.drafter(OWN, dataclasses.replace(kit.CHAIN, nodes=5, depth=4))
    with pytest.raises(ValueError, match="shape is 'BestFirst with MlpHead'"):
        DepthTree(MlpHead(OWN), BestFirst(nodes=4, depth=2))
    with pytest.raises(ValueError, match="it drafts as a DepthTree"):
        MlpHead(OWN).logits(kit.params(OWN), jnp.zeros((1, 1, kit.H)))
    with pytest.raises(ValueError, match="target is 'one of hidden_size 16'"):
        medusa.tapped(dataclasses.replace(OWN, hidden_size=12), llama()[0])
