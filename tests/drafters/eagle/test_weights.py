"""Files of heads on features: written and read back, known by their config, refused by the name of what is wrong."""

import dataclasses
import json
import types

import jax
import numpy as np
import pytest

from spec_jax.drafters import medusa, medusa_files, mlp_speculator_files
from spec_jax.drafters.depth_tree import DepthTree
from spec_jax.drafters.eagle import weights
from spec_jax.drafters.files import read_directory, write_directory
from spec_jax.drafters.head_tree import HeadTree
from spec_jax.drafters.load import load_drafter
from spec_jax.models.checkpoint import CheckpointError
from tests.drafters.block.kit import llama
from tests.drafters.eagle import kit

TARGET = types.SimpleNamespace(target=llama()[0], params=llama()[1])
VERIFIER = {"name_or_path": "somewhere", "architectures": ["LlamaForCausalLM"]}


def save(directory, config, params):
    if kit.is_eagle(config):
        weights.save(directory, config, params, VERIFIER, steps=4)
    else:
        files = mlp_speculator_files if config == kit.CONFIGS["mlp_speculator"] else medusa_files
        files.save(directory, config, params, "somewhere")


@pytest.mark.parametrize("name", kit.CONFIGS)
def test_what_is_written_is_read_back(name, tmp_path):
    config, own = kit.CONFIGS[name], kit.params(kit.CONFIGS[name])
    save(tmp_path, config, own)
    loaded = load_drafter(tmp_path, TARGET)
    got = loaded.drafter.head.config
    own_head = kit.is_eagle(config) and config.inputs == "joined"
    assert got == (dataclasses.replace(config, own_head=own_head) if kit.is_eagle(config) else config)
    assert isinstance(loaded.drafter, HeadTree if name in ("eagle3", "eagle3.1", "eagle1") else DepthTree)
    assert loaded.drafter.depth == {"eagle1": 5, "medusa": 3, "hydra": 3, "hydra++": 3, "mlp_speculator": 3}.get(
        name, 4
    )
    assert loaded.target.taps == (config.taps if kit.is_eagle(config) else (3,))
    if kit.is_eagle(config) and own_head and own.lm_head is None:  # the target's, which the format wants in the file
        np.testing.assert_array_equal(loaded.params.lm_head.kernel, llama()[1].head.kernel)
        own = dataclasses.replace(own, lm_head=loaded.params.lm_head)
    assert jax.tree.structure(loaded.params) == jax.tree.structure(own)
    for a, b in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(own), strict=True):
        np.testing.assert_array_equal(a, b)
    assert loaded.params.ends.embedding is llama()[1].embedding


def sglang(directory):
    """The same head as SafeAILab and SGLang store it: a flat config, a layer called midlayer, ids of outputs."""
    fields, tensors = read_directory(directory)
    middle = {name.replace("layers.0.", "midlayer."): x for name, x in tensors.items()}
    settings = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}
    flat = fields["transformer_layer_config"] | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": settings}
    return flat | {"draft_vocab_size": fields["draft_vocab_size"]}, middle


def test_the_form_of_safeailab_and_sglang(tmp_path):
    config, own = kit.CONFIGS["eagle3"], kit.params(kit.CONFIGS["eagle3"])
    save(tmp_path, config, own)
    other = np.asarray(own.ends.embedding).T + 1
    fields, tensors = sglang(tmp_path)
    write_directory(tmp_path, fields, tensors)
    loaded = load_drafter(tmp_path, TARGET)
    assert loaded.drafter.head.config == dataclasses.replace(config, own_head=True)
    for a, b in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(own), strict=True):
        np.testing.assert_array_equal(a, b)
    counted = fields | {"eagle_config": {}, "eagle_aux_hidden_state_layer_ids": [0, 1, 3]}  # as vLLM counts
    assert weights.from_tensors("here", counted, tensors, *llama())[0].taps == (0, 1, 3)
    write_directory(tmp_path, fields, tensors | {"embed_tokens.weight": other})
    ends = load_drafter(tmp_path, TARGET).params.ends
    np.testing.assert_array_equal(ends.embedding, other.T)
    assert ends.head is own.ends.head


def test_d26_tensors_that_do_not_fit_are_named(tmp_path):
    config, own = kit.CONFIGS["eagle3"], kit.params(kit.CONFIGS["eagle3"])
    save(tmp_path, config, own)
    fields, tensors = read_directory(tmp_path)
    without = lambda *names: {n: x for n, x in tensors.items() if n not in names}  # noqa: E731
    cases = (
        (
            without("norm.weight", "layers.0.hidden_norm.weight"),
            "missing tensors: layers.0.hidden_norm.weight, norm.weight",
        ),
        (without("lm_head.weight"), "missing tensors: lm_head.weight"),
        (without("t2d"), "missing tensors: t2d"),
        (tensors | {"layers.1.mlp.up_proj.weight": np.zeros(3)}, "unexpected tensors: layers.1.mlp.up_proj.weight"),
        (tensors | {"mask_hidden": np.zeros(3)}, "unexpected tensors: mask_hidden"),
        (tensors | {"fc.weight": np.zeros((16, 32))}, r"wrong tensors: fc.weight \[16, 32\], not \[16, 48\]"),
        (tensors | {"d2t": tensors["d2t"] + 9}, "d2t leads to ids twice, or outside"),
        (tensors | {"t2d": ~tensors["t2d"]}, "t2d keeps other tokens than d2t leads to"),
    )
    for wrong, message in cases:
        with pytest.raises(CheckpointError, match=message):
            weights.from_tensors("here", fields, wrong, *llama())


def test_configs_that_do_not_fit_are_named(tmp_path):
    save(tmp_path, kit.CONFIGS["eagle3"], kit.params(kit.CONFIGS["eagle3"]))
    fields, tensors = read_directory(tmp_path)
    layer = fields["transformer_layer_config"]
    for change, message in (
        ({"transformer_layer_config": layer | {"vocab_size": 21}}, "vocab_size is 21; taken: the target's, 20"),
        ({"transformer_layer_config": layer | {"hidden_size": 32}}, "hidden_size is 32"),
        ({"transformer_layer_config": layer | {"layer_types": ["sliding_attention"]}}, "layer_types is"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, "layer ids is"),
        ({"fc_norm": True, "norm_before_fc": True}, "fc_norm is True"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64"),
        ({"speculators_model_type": "peagle"}, "architectures is .*; taken: PEagleSpeculator or PEagleDraftModel"),
    ):
        with pytest.raises(CheckpointError, match=message):
            weights.from_tensors("here", fields | change, tensors, *llama())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"speculators_model_type": "eagle"}))
    with pytest.raises(CheckpointError, match="no drafter of a kind known here"):
        load_drafter(tmp_path, TARGET)


def test_heads_of_medusa_by_either_of_their_names(tmp_path):
    config, own = kit.CONFIGS["medusa"], kit.params(kit.CONFIGS["medusa"])
    save(tmp_path, config, own)
    fields, tensors = read_directory(tmp_path)
    assert set(tensors) == {f"{i}.{n}" for i in range(3) for n in ("0.linear.weight", "0.linear.bias", "1.weight")}
    longer = {f"medusa_head.{name}": x for name, x in tensors.items()}
    _, got = medusa_files.from_tensors("here", fields, longer, *llama())
    np.testing.assert_array_equal(got.outputs[2].kernel, own.outputs[2].kernel)
    with pytest.raises(CheckpointError, match=r"missing tensors: 3.0.linear.weight"):
        medusa_files.from_tensors("here", fields | {"medusa_num_heads": 4}, tensors, *llama())
    with pytest.raises(CheckpointError, match="medusa_num_layers is 0"):
        medusa_files.from_tensors("here", fields | {"medusa_num_layers": 0}, tensors, *llama())


def test_medusas_heads_without_maps_of_their_own_use_the_targets(tmp_path):
    config = dataclasses.replace(kit.CONFIGS["medusa"], own_head=False)
    own = kit.params(config)
    save(tmp_path, config, own)
    fields, tensors = read_directory(tmp_path)
    assert set(tensors) == {f"{i}.0.linear.{n}" for i in range(3) for n in ("weight", "bias")}
    loaded = load_drafter(tmp_path, TARGET)
    assert loaded.drafter.head.config == config and loaded.params.outputs == ()
    hidden = jax.random.normal(jax.random.key(1), (2, config.hidden_size))
    got = medusa.head_logits(config, loaded.params, 2, hidden, None)
    np.testing.assert_allclose(got, own.ends.logits(own.blocks[2][0](hidden)), rtol=1e-6)
    with pytest.raises(CheckpointError, match=r"missing tensors: 0.1.weight"):
        medusa_files.from_tensors("here", {k: v for k, v in fields.items() if k != "own_head"}, tensors, *llama())
    with pytest.raises(CheckpointError, match="own_head"):
        medusa_files.from_tensors("here", fields | {"own_head": "no"}, tensors, *llama())
