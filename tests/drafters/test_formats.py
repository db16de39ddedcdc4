"""What a drafter's files may not say: maps of a vocabulary, kinds of numbers, and fields that contradict each other."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.drafters import early_exit, files, medusa_files, parallel_files, recurrent, recurrent_files
from spec_jax.drafters.block import native, weights
from spec_jax.drafters.block.config import FULL
from spec_jax.drafters.block.ends import ends_of
from spec_jax.drafters.eagle import weights as eagle_weights
from spec_jax.drafters.early_exit import EarlyExitConfig
from spec_jax.drafters.load import load_drafter
from spec_jax.drafters.parallel_model import ParallelConfig
from spec_jax.models.checkpoint import CheckpointError
from tests.drafters.block import kit
from tests.drafters.block.test_weights import PUBLISHED, SPECULATORS, drawn
from tests.drafters.eagle import kit as heads
from tests.drafters.eagle.test_weights import sglang

TARGET = types.SimpleNamespace(target=kit.llama()[0], params=kit.llama()[1])
LAYERS, EPS = TARGET.target.config.num_layers, TARGET.target.config.rms_norm_eps
VERIFIER = {"name_or_path": "somewhere", "architectures": ["LlamaForCausalLM"]}


def save(kind, folder):
    """A directory of the kind."""
    if kind in ("native", "bigram"):
        head = kit.HEADS["bigram" if kind == "bigram" else "plain"]
        c, params = drawn(head, {} if kind == "bigram" else {"draft_vocab_size": 9})
        native.save_native(folder, c, head, params)
    elif kind in SPECULATORS:
        c, params = drawn(*SPECULATORS[kind])
        weights.save_speculators(folder, c, SPECULATORS[kind][0], params, VERIFIER)
    elif kind in PUBLISHED:
        c, params = drawn(*PUBLISHED[kind])
        weights.save_published(folder, c, PUBLISHED[kind][0], params, LAYERS)
    elif kind == "recurrent":
        config = recurrent.RecurrentConfig(kit.V, kit.H, 1, EPS)
        own = recurrent.init_params(config, jax.random.key(0), ends_of(TARGET.params))
        recurrent_files.save(folder, config, own, "somewhere")
    elif kind == "parallel":
        parallel_files.save(folder, ParallelConfig(kit.LLAMA, kit.MASK, 4), TARGET.params, "somewhere")
    elif kind == "early exit":
        config = EarlyExitConfig(kit.LLAMA, 1, 2)
        early_exit.save(folder, config, early_exit.init_params(config, TARGET.params), "somewhere")
    elif kind in ("medusa", "hydra"):
        medusa_files.save(folder, heads.CONFIGS[kind], heads.params(heads.CONFIGS[kind]), "somewhere")
    else:
        config = heads.CONFIGS["eagle3" if kind == "SGLang" else kind]
        eagle_weights.save(folder, config, heads.params(config), VERIFIER)
        if kind == "SGLang":
            files.write_directory(folder, *sglang(folder))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A kind's directory, its fields and its tensors; written once."""

    @functools.cache
    def found(kind):
        folder = tmp_path_factory.mktemp("drafter")
        save(kind, folder)
        load_drafter(folder, TARGET)
        return folder, *files.read_directory(folder)

    return found


def nested(path, value):
    """The value under a path of fields."""
    return {path[0]: nested(path[1:], value)} if path else value


def merged(fields, changes):
    """The fields with some replaced, in objects of theirs as well."""
    inside = {k: merged(fields[k], v) for k, v in changes.items() if isinstance(v, dict) and k in fields}
    return fields | changes | inside


def reload(folder, fields, tensors):
    """What comes of a directory with these fields and tensors."""
    files.write_directory(folder, fields, tensors)
    return load_drafter(folder, TARGET)


INTEGERS = np.array([0, 2, 3, 5, 7, 11, 13, 17, 19], np.int32)
OFFSETS = INTEGERS.astype(np.int64) - np.arange(9)
OUT, TWICE = INTEGERS + 80 * (INTEGERS == 19), INTEGERS - 2 * (INTEGERS == 19)
T2D = np.isin(np.arange(kit.V), INTEGERS)
SUCCESSORS = np.full((kit.V, 3), -1, np.int32)
TENSORS = {
    # kind, tensor: what it holds, what is said of it
    ("native", "kept", "an id outside"): (OUT, "kept holds ids twice, or outside 0 .. 19"),
    ("native", "kept", "below"): (INTEGERS - 1, "kept holds ids twice, or outside 0 .. 19"),
    ("native", "kept", "twice"): (TWICE, "kept holds ids twice, or outside 0 .. 19"),
    ("native", "kept", "floats"): (INTEGERS.astype(np.float32), "kept of float32, not integers"),
    ("native", "kept", "booleans"): (INTEGERS > 0, "kept of bool, not integers"),
    ("native", "network.fc.kernel", "integers"): (np.int32, "network.fc.kernel of int32, not floating-point numbers"),
    ("bigram", "head.successors", "an id outside"): (SUCCESSORS + 21, "head.successors holds ids twice in a row, or"),
    ("bigram", "head.successors", "below"): (SUCCESSORS - 1, "head.successors holds ids twice in a row, or outside -1"),
    ("bigram", "head.successors", "floats"): (np.float32, "head.successors of float32, not integers"),
    ("DFlash", "fc.weight", "bytes"): (np.uint8, "fc.weight of uint8, not floating-point numbers"),
    ("DFlash", "fc.weight", "integers"): (np.int32, "fc.weight of int32, not floating-point numbers"),
    ("DFlash", "fc.weight", "booleans"): (np.bool_, "fc.weight of bool, not floating-point numbers"),
    ("DSpark", "embed_tokens.weight", "integers"): (np.int32, "embed_tokens.weight of int32, not floating-point"),
    ("dspark", "d2t", "floats"): (OFFSETS + 0.7, "d2t of float"),
    ("dspark", "d2t", "booleans"): (OFFSETS > 0, "d2t of bool, not integers"),
    ("dspark", "t2d", "floats"): (T2D.astype(np.float32), "t2d of float32, not integers"),
    ("dspark", "t2d", "other bytes"): (T2D.astype(np.uint8) * 3, "t2d holds 3, takes 0 and 1"),
    ("dspark", "t2d", "other integers"): (T2D * np.arange(1, 21), "t2d holds 3, takes 0 and 1"),
    ("dspark", "lm_head.weight", "integers"): (np.int32, "lm_head.weight of int32, not floating-point numbers"),
    ("eagle3", "d2t", "floats"): (np.float32, "d2t of float32, not integers"),
    ("eagle3", "t2d", "other bytes"): (lambda x: 2 * x.astype(np.uint8), "t2d holds 2, takes 0 and 1"),
    ("eagle3", "fc.weight", "bytes"): (np.uint8, "fc.weight of uint8, not floating-point numbers"),
    ("TreeFlash", "ar_approximation.d.weight", "one axis"): (lambda x: x[:, 0], r"d.weight is \[16\]; taken: \[16, "),
    ("TreeFlash", "ar_approximation.d.weight", "three axes"): (lambda x: x[..., None], r"d.weight is \[16, 8, 1\]"),
    ("TreeFlash", "ar_approximation.d.weight", "nothing"): (lambda x: x[:, :0], r"d.weight is \[16, 0\]"),
}


@pytest.mark.parametrize("row", TENSORS, ids=" ".join)
def test_tensors_of_another_kind_are_refused(row, written, tmp_path):
    kind, name, _ = row
    value, message = TENSORS[row]
    _, fields, tensors = written(kind)
    if isinstance(value, type):
        value = tensors[name].astype(value)
    elif callable(value):
        value = value(tensors[name])
    wide = {np.dtype(np.float64): np.float32}  # which safetensors' readers take
    value = value.astype(wide.get(value.dtype, value.dtype))
    with pytest.raises(CheckpointError, match=message):
        reload(tmp_path, fields, tensors | {name: value})


@pytest.mark.parametrize("kind", ("DFlash", "dspark", "native", "eagle3", "TreeFlash"))
def test_a_tensor_of_other_axes_is_named_whichever_it_is(kind, written):
    _, fields, tensors = written(kind)
    read = {
        "native": lambda t: native.from_native("here", fields, t, TARGET.params, LAYERS),
        "eagle3": lambda t: eagle_weights.from_tensors("here", fields, t, TARGET.target, TARGET.params),
    }.get(kind, lambda t: weights.from_tensors("here", fields, t, TARGET.params, LAYERS))
    for name, x in tensors.items():
        for other in (np.asarray(x[0]), x[None], x.reshape(-1)[:0]):
            with pytest.raises(CheckpointError, match=name.removeprefix("model.")):
                read(tensors | {name: other})


def test_bytes_and_halves_that_say_the_same_are_taken(written, tmp_path):
    _, fields, tensors = written("dspark")
    halves = {n: jnp.asarray(x, jnp.bfloat16) if x.dtype == np.float32 else x for n, x in tensors.items()}
    same = {"t2d": tensors["t2d"].astype(np.uint8), "d2t": tensors["d2t"].astype(np.int32)}
    got = reload(tmp_path, fields, {n: np.asarray(x) for n, x in halves.items()} | same)
    np.testing.assert_array_equal(got.params.kept, INTEGERS)


FIELDS = {
    # kind, field: its value, what is said of it
    ("native", "network.taps"): ([1, 99], "taps .1, 99.; taken: the target's 3 layers at most"),
    ("native", "network.mask_token"): (True, "mask_token is True"),
    ("native", "head.settings.extra"): (1, "not a block drafter's: .*extra"),
    ("native", "parallel"): (True, "config.json has parallel"),
    ("recurrent", "network.final_norm_eps"): (2 * EPS, "target is .one of rms_norm_eps"),
    ("recurrent", "steps"): (True, "steps: got .*True"),
    ("recurrent", "more"): (1, "config.json has more"),
    ("parallel", "more"): (1, "config.json has more"),
    ("early exit", "more"): (1, "config.json has more"),
    ("dflash", "markov_rank"): (6, "markov_rank is 6 with speculators_model_type dflash; taken with dspark alone"),
    ("dflash", "conv_kernel_size"): (2, "taken with dflash2 alone"),
    ("dflash", "selector_rank"): (6, "taken with dflash2 alone"),
    ("dflash", "xpress_rank"): (6, "taken with xpress alone"),
    ("xpress", "markov_rank"): (6, "taken with dspark alone"),
    ("dflash", "architectures"): (["DFlash2DraftModel"], "architectures is .'DFlash2DraftModel'.; taken: DFlashSpec"),
    ("dspark", "architectures"): (["DSparkSpeculator", "DFlashSpeculator"], "architectures is"),
    ("dflash", "speculators_config.algorithm"): ("dspark", "algorithm is 'dspark'; taken: None or 'dflash'"),
    ("dflash", "speculators_config.threshold"): (0.5, "speculators_config has threshold"),
    ("dflash", "gated_context"): (False, "config.json has gated_context"),
    ("dflash", "output_multiplier"): (0.5, "config.json has output_multiplier"),
    ("dflash", "transformer_layer_config.mlp_bias"): (True, "mlp_bias is True"),
    ("dflash", "transformer_layer_config.final_logit_softcapping"): (30.0, "final_logit_softcapping is 30.0"),
    ("dflash", "transformer_layer_config.block_size"): (9, "block_size is 9 in transformer_layer_config and 5 outside"),
    ("dflash", "transformer_layer_config.is_causal"): (
        True,
        "is_causal is True; taken: what sliding_window_non_causal",
    ),
    ("DFlash", "num_target_layers"): (36, "num_target_layers is 36; taken: the target's, 3"),
    ("DFlash", "dflash_config.causal_head"): (True, "causal_head is True; taken: what is_causal says, False"),
    ("DFlash", "dflash_config.block_size"): (9, "block_size is 9 in dflash_config and 5 outside"),
    ("DFlash", "target_layer_ids"): ([0, 1], r"target_layer_ids is .0, 2. in dflash_config and .0, 1. outside"),
    ("DFlash", "treeflash_config.mask_token_id"): (3, "mask_token_id is 3 in treeflash_config and 19 outside"),
    ("DFlash", "attn_output_gate"): (True, "attn_output_gate is True"),
    ("DFlash", "mlp_bias"): (True, "mlp_bias is True"),
    ("DFlash", "num_experts"): (4, "num_experts is 4"),
    ("DFlash", "partial_rotary_factor"): (0.5, "partial_rotary_factor is 0.5"),
    ("DFlash", "attn_logit_softcapping"): (30.0, "attn_logit_softcapping is 30.0"),
    ("DFlash", "dflash_config.causal"): (True, "dflash_config has causal"),
    ("DSpark", "draft_shift"): (False, "draft_shift is False; taken: what the other fields say"),
    ("Domino", "dflash_config.draft_shift"): (False, "draft_shift is False; taken: what the other fields say"),
    ("eagle3", "mask_token_id"): (19, "config.json has mask_token_id"),
    ("eagle3", "architectures"): (["PEagleSpeculator"], "architectures is .'PEagleSpeculator'."),
    ("eagle3", "speculators_config.algorithm"): ("peagle", "algorithm is 'peagle'"),
    ("eagle3", "eagle_config"): ({}, "config.json has eagle_config"),
    ("eagle3", "transformer_layer_config.final_logit_softcapping"): (30.0, "final_logit_softcapping is 30.0"),
    ("eagle3", "transformer_layer_config.norm_output"): (True, "norm_output is True in transformer_layer_config and"),
    ("p_eagle", "speculators_config.algorithm"): ("eagle3", "algorithm is 'eagle3'"),
    ("SGLang", "final_logit_softcapping"): (30.0, "final_logit_softcapping is 30.0"),
    ("SGLang", "attn_output_gate"): (True, "attn_output_gate is True"),
    ("SGLang", "bias"): (True, "bias is True"),
    ("SGLang", "mask_token_id"): (19, "mask_token_id is 19"),
    ("SGLang", "num_target_layers"): (36, "num_target_layers is 36"),
    ("SGLang", "eagle_config.parallel_drafting"): (True, "parallel_drafting is True"),
    ("SGLang", "eagle_config.parallel_draft_step"): (4, "parallel_draft_step is 4"),
    ("SGLang", "eagle_config.use_last_layernorm"): (False, "use_last_layernorm is False"),
    ("SGLang", "eagle_config.use_mtp_layernorm"): (True, "use_mtp_layernorm is True"),
    ("SGLang", "eagle_config.depth_embedding"): (False, "eagle_config has depth_embedding"),
    ("medusa", "hydra_num_heads"): (3, "hydra_num_heads is 3; taken: nothing with medusa_num_heads"),
    ("medusa", "vocab_size"): (21, "vocab_size is 21; taken: None or 20"),
    ("hydra", "hydra_head_arch"): ("prefix-mlp", "hydra_head_arch is 'prefix-mlp'"),
    ("eagle1", "norm_output"): (True, "norm_output is True"),
    ("eagle1", "eagle_config.use_aux_hidden_state"): (True, "use_aux_hidden_state is True"),
    ("eagle1", "eagle_aux_hidden_state_layer_ids"): ([1, 2], "eagle_aux_hidden_state_layer_ids is .1, 2."),
}
TAKEN = {
    # kind: what published files of it say besides, in one version or another
    "DFlash": {
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "attention_dropout": 0.0, "initializer_range": 0.02,
        "bos_token_id": 1, "eos_token_id": [2], "pad_token_id": None, "dtype": "bfloat16", "torch_dtype": "bfloat16",
        "rope_scaling": None, "max_window_layers": 5, "tie_word_embeddings": True, "use_cache": True,
        "transformers_version": "4.57.1", "dflash_config": {"block_size": 5, "projector_type": "dflash"},
    },
    "DSpark": {"num_anchors": 512, "layer_types": [FULL] * 2, "dflash_config": {"projector_type": "dspark"}},
    "JetSpec": {"dflash_config": {"draft_shift": False, "target_hidden_size": kit.H}, "hidden_dim_adapter": None},
    "dflash": {
        "auto_map": {"": "config.DFlashSpeculatorConfig"}, "has_no_defaults_at_init": False, "dtype": "bfloat16",
        "torch_dtype": "bfloat16", "transformers_version": "4.57.1", "target_hidden_size": None,
        "transformer_layer_config": {"use_cache": True, "attention_dropout": 0.0, "initializer_range": 0.02},
    },
    "dspark": {"architectures": ["DSparkDraftModel"]},
    "xpress": {"architectures": ["XPressDraftModel"]},
    "eagle3": {"architectures": ["Eagle3DraftModel"], "embed_requires_grad": False, "mask_token_id": None},
    "p_eagle": {"architectures": ["PEagleDraftModel"], "embed_requires_grad": True},
    "SGLang": {
        "pretraining_tp": 1, "mlp_bias": False, "use_cache": True, "num_target_layers": LAYERS,
        "eagle_config": {
            "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
            "next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": None,
        },
    },
    "eagle1": {"eagle_config": {"use_aux_hidden_state": False, "use_last_layernorm": False}, "use_cache": True},
}  # fmt: skip


@pytest.mark.parametrize("row", FIELDS, ids=" ".join)
def test_fields_that_do_not_fit_are_refused(row, written, tmp_path):
    kind, name = row
    value, message = FIELDS[row]
    _, fields, tensors = written(kind)
    with pytest.raises(CheckpointError, match=message):
        reload(tmp_path, merged(fields, nested(name.split("."), value)), tensors)


@pytest.mark.parametrize("kind", TAKEN)
def test_what_published_files_say_besides_changes_nothing(kind, written, tmp_path):
    folder, fields, tensors = written(kind)
    want, got = load_drafter(folder, TARGET), reload(tmp_path, merged(fields, TAKEN[kind]), tensors)
    assert got.parts == want.parts and got.target.taps == want.target.taps
