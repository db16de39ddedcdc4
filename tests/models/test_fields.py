"""Every reader of a config.json, given a value of a wrong kind in each field: a ValueError that names the field."""

import copy
import functools
import math

import pytest

from spec_jax.drafters.block.published import read_config, read_speculators
from spec_jax.drafters.block.weights import is_block
from spec_jax.drafters.eagle import published as eagle
from spec_jax.models import gemma_config
from spec_jax.models.config import LlamaConfig
from spec_jax.models.qwen_config import QwenConfig
from tests.models.test_config import LLAMA

FULL, WINDOW = "full_attention", "sliding_attention"
WRONG = ("7", 7.5, 0, -3, True, None, math.nan, math.inf, [], [7.5], ["x"], [-3], {}, {"x": 1})


def kind(*, null=False, **given):
    """A predicate: which of the wrong values a field takes after all; `numbers` any over 0, `zero` 0 as well."""
    numbers, flags = given.get("numbers"), given.get("flags")

    def takes(value):
        if value is None:
            return null
        if isinstance(value, bool):
            return bool(flags)
        if isinstance(value, int | float):
            return bool(numbers) and 0 < value < 1e38 or value == 0 and bool(given.get("zero"))
        return isinstance(value, dict) and bool(given.get("object")) or value == [] and bool(given.get("none"))

    return takes


SIZE, DEFAULTED, FIXED = kind(), kind(null=True), kind()
NUMBER, MAYBE_NUMBER = kind(numbers=True), kind(numbers=True, null=True)
FLAG, MAYBE_FLAG = kind(flags=True), kind(flags=True, null=True)
OBJECT, KINDS, IDS = kind(null=True, object=True), kind(null=True), kind(null=True)

ROPE = {"rope_theta": MAYBE_NUMBER, "rope_parameters": OBJECT, "rope_scaling": OBJECT}
COMMON = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"), SIZE),
    "num_attention_heads": SIZE,
    "num_key_value_heads": DEFAULTED,
    "head_dim": DEFAULTED,
    "max_position_embeddings": DEFAULTED,
    "quantization_config": kind(null=True),
    **ROPE,
}
MODEL = COMMON | {
    "model_type": FIXED,
    "rms_norm_eps": NUMBER,
    "tie_word_embeddings": FLAG,
    "attention_bias": FLAG,
}
LLAMAS = MODEL | {
    "hidden_act": FIXED,
    "mlp_bias": FLAG,
    "layer_types": kind(null=True, none=True),
    "partial_rotary_factor": kind(null=True),
    "rope_interleaved": kind(null=True),
    "sliding_window": kind(null=True),
}
YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "truncate": True}
YARNS = {"rope_scaling." + name: MAYBE_NUMBER for name in ("factor", "beta_fast")} | {
    "rope_scaling.type": kind(null=True),
    "rope_scaling.original_max_position_embeddings": DEFAULTED,
    "rope_scaling.truncate": MAYBE_FLAG,
    "rope_scaling.partial_rotary_factor": kind(null=True),
    "original_max_position_embeddings": DEFAULTED,
}
LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
QWENS = {name: takes for name, takes in MODEL.items() if name != "max_position_embeddings"} | {
    "max_position_embeddings": SIZE,
    "num_key_value_heads": SIZE,
    "hidden_act": FIXED,
    "layer_types": KINDS,
    "partial_rotary_factor": MAYBE_NUMBER,
    "rope_interleaved": kind(null=True),
}
WINDOWED = {"use_sliding_window": MAYBE_FLAG, "max_window_layers": kind(null=True, zero=True)}
EXPERTS = dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), SIZE) | {
    "mlp_only_layers": kind(null=True, none=True),
    "decoder_sparse_step": DEFAULTED,
    "norm_topk_prob": FLAG,
}
DELTA = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"), SIZE) | dict.fromkeys(
    ("linear_value_head_dim", "linear_conv_kernel_dim"), SIZE
)
QWEN = LLAMA | {"model_type": "qwen3", "head_dim": 8, "max_position_embeddings": 64}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
NEXT = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
NEXT |= {"linear_conv_kernel_dim": 4, "shared_expert_intermediate_size": 16, "num_hidden_layers": 4}
GEMMA = LLAMA | {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 16}
GEMMAS = {n: t for n, t in MODEL.items() if n not in ("model_type", "tie_word_embeddings", "rope_parameters")} | {
    "num_key_value_heads": SIZE,
    "tie_word_embeddings": kind(flags=True),
    "hidden_activation": FIXED,
    "final_logit_softcapping": kind(null=True),
    "attn_logit_softcapping": kind(null=True),
    "use_bidirectional_attention": FLAG,
    "layer_types": KINDS,
    "sliding_window_pattern": DEFAULTED,
    "sliding_window": DEFAULTED,
    "query_pre_attn_scalar": MAYBE_NUMBER,
    "rope_local_base_freq": MAYBE_NUMBER,
}
NESTED = {"rope_parameters": {FULL: {"rope_theta": 1e6}, WINDOW: {"rope_theta": 1e4}}}

LAYER = {**LLAMA, "model_type": "qwen3", "head_dim": 8, "num_hidden_layers": 2}
BLOCKS = COMMON | {
    **dict.fromkeys(("model_type", "hidden_act", "attention_bias"), FIXED),
    "attention_bias": FLAG,
    "rms_norm_eps": MAYBE_NUMBER,
    "layer_types": KINDS,
    **WINDOWED,
}
DFLASH = {**LAYER, "architectures": ["DFlashDraftModel"], "block_size": 4, "dflash_config": {"mask_token_id": 3}}
OWN = {
    "mask_token_id": kind(zero=True),
    "target_layer_ids": IDS,
    "projector_type": kind(null=True),
    "num_target_layers": DEFAULTED,
    "causal_head": MAYBE_FLAG,
    "draft_shift": MAYBE_FLAG,
    "input_embedding_scale": MAYBE_NUMBER,
    "output_multiplier": MAYBE_NUMBER,
    "final_logit_softcapping": kind(numbers=True, null=True, zero=True),
    "target_hidden_size": kind(null=True),
    "block_size": DEFAULTED,
}
DFLASHES = BLOCKS | {
    "architectures": kind(),
    "dflash_config": OBJECT,
    "treeflash_config": OBJECT,
    "is_causal": MAYBE_FLAG,
    **{name: takes for name, takes in OWN.items() if name not in ("mask_token_id", "num_target_layers")},
}
INSIDE = {f"dflash_config.{n}": t for n, t in OWN.items() if n not in ("num_target_layers", "block_size")}
MARKOV = {
    "markov_rank": DEFAULTED,
    "markov_head_type": kind(null=True),
    "enable_confidence_head": MAYBE_FLAG,
    "confidence_head_with_markov": MAYBE_FLAG,
}
DOMINO = {"emb_dim": DEFAULTED, "gru_hidden_dim": DEFAULTED, "shift_label": MAYBE_FLAG}
DOMINO |= {"pure_draft_prefix_len": kind(null=True, zero=True)}
SELECTOR = {"conv_kernel_size": kind(), "conv_group_size": DEFAULTED, "selector_rank": kind(), "selector_top_k": SIZE}
SELECTOR |= {"selector_top_k": DEFAULTED}
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}
SPECULATOR = {
    "transformer_layer_config": LAYER,
    "aux_hidden_state_layer_ids": [1, 3],
    "mask_token_id": 3,
}
SPECULATORS = {f"transformer_layer_config.{name}": takes for name, takes in BLOCKS.items()} | {
    "speculators_model_type": kind(),
    "transformer_layer_config": OBJECT,
    "aux_hidden_state_layer_ids": kind(),
    "mask_token_id": kind(zero=True),
    "sliding_window_non_causal": MAYBE_FLAG,
    "sample_from_anchor": MAYBE_FLAG,
    "draft_vocab_size": DEFAULTED,
    "block_size": DEFAULTED,
}
HEADS = {
    "num_hidden_layers": DEFAULTED,
    "model_type": FIXED,
    "hidden_act": FIXED,
    "mlp_bias": FLAG,
    "attention_bias": MAYBE_FLAG,
    "rms_norm_eps": MAYBE_NUMBER,
    "layer_types": kind(null=True, none=True),
    "use_sliding_window": MAYBE_FLAG,
}
EAGLES = dict.fromkeys(("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual"), MAYBE_FLAG) | {
    "draft_vocab_size": DEFAULTED,
    "target_hidden_size": kind(null=True),
}
ONE = LLAMA | {"num_hidden_layers": 1}
AUX = "eagle_aux_hidden_state_layer_ids"
TARGET = LlamaConfig.from_hf(LLAMA | {"num_hidden_layers": 6})
read_eagle = functools.partial(eagle.read_config, names=(), target=TARGET)
read_block = functools.partial(read_config, vocab_size=100, target_layers=6)
read_speculator = functools.partial(read_speculators, vocab_size=100)

READERS = {
    "llama": (LlamaConfig.from_hf, LLAMA, LLAMAS),
    "mistral": (LlamaConfig.from_hf, LLAMA | {"model_type": "mistral", "sliding_window": 9}, LLAMAS),
    "llama, yarn": (LlamaConfig.from_hf, LLAMA | {"rope_scaling": YARN}, YARNS),
    "llama, longrope": (
        LlamaConfig.from_hf,
        LLAMA | {"rope_scaling": LONG},
        {"rope_scaling.short_factor": kind(), "rope_scaling.long_factor": kind()},
    ),
    "qwen3": (
        QwenConfig.from_hf,
        QWEN | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
        QWENS | WINDOWED | {"sliding_window": kind(null=True)},
    ),
    "qwen3_moe": (
        QwenConfig.from_hf,
        QWEN | SPARSE | {"model_type": "qwen3_moe"},
        {name: takes for name, takes in QWENS.items() if name != "intermediate_size"} | EXPERTS,
    ),
    "qwen3_moe, num_local_experts": (
        QwenConfig.from_hf,
        {n: x for n, x in (QWEN | SPARSE).items() if n != "num_experts"}
        | {"model_type": "qwen3_moe", "num_local_experts": 4},
        {"num_local_experts": DEFAULTED},
    ),
    "qwen3_next": (
        QwenConfig.from_hf,
        QWEN | SPARSE | NEXT | {"model_type": "qwen3_next"},
        DELTA
        | {"full_attention_interval": DEFAULTED, "shared_expert_intermediate_size": SIZE, "attn_output_gate": FLAG}
        | {"mtp_use_dedicated_embeddings": kind(null=True), "rope_parameters.partial_rotary_factor": MAYBE_NUMBER},
    ),
    "qwen3_5": (
        QwenConfig.from_hf,
        {"model_type": "qwen3_5", "text_config": QWEN | NEXT},
        {"text_config": kind(object=True), "text_config.vocab_size": SIZE, "tie_word_embeddings": FLAG},
    ),
    "gemma3": (gemma_config.from_hf, GEMMA, GEMMAS),
    "gemma3, by kind": (
        gemma_config.from_hf,
        GEMMA | NESTED,
        {
            "rope_parameters": kind(null=True, object=True),
            f"rope_parameters.{FULL}": kind(object=True),
            f"rope_parameters.{WINDOW}.rope_theta": MAYBE_NUMBER,
        },
    ),
    "dflash": (read_block, DFLASH, DFLASHES | INSIDE),
    "dflash, sliding": (
        read_block,
        DFLASH | {"layer_types": [WINDOW] * 2, "sliding_window": 9},
        {"sliding_window": kind()},
    ),
    "dspark": (read_block, DFLASH | {"architectures": ["Qwen3DSparkModel"], "markov_rank": 6}, MARKOV),
    "domino": (read_block, DFLASH | {"architectures": ["DominoDraftModel"]}, DOMINO),
    "dflash2": (read_block, DFLASH | DFLASH2 | {"architectures": ["DFlash2DraftModel"]}, SELECTOR),
    "treeflash": (
        read_block,
        DFLASH | {"architectures": ["TreeFlashDraftModel"], "treeflash_config": {"ar_approximation": "swiglu"}},
        {"treeflash_config": OBJECT, "treeflash_config.ar_approximation": kind()},
    ),
    "speculators": (read_speculator, SPECULATOR | {"speculators_model_type": "dflash"}, SPECULATORS),
    "speculators dspark": (read_speculator, SPECULATOR | {"speculators_model_type": "dspark"}, MARKOV),
    "speculators dflash2": (
        read_speculator,
        SPECULATOR | {"speculators_model_type": "dflash2"},
        dict.fromkeys(DFLASH2, DEFAULTED),
    ),
    "speculators xpress": (
        read_speculator,
        SPECULATOR | {"speculators_model_type": "xpress"},
        dict.fromkeys(("xpress_rank", "xpress_mlp_ratio", "num_jacobi_passes"), DEFAULTED),
    ),
    "eagle3": (
        read_eagle,
        ONE | {"architectures": ["LlamaForCausalLMEagle3"]},
        COMMON | HEADS | EAGLES | {"tie_word_embeddings": FLAG, "eagle_config": OBJECT, AUX: IDS},
    ),
    "eagle3, eagle_config": (
        read_eagle,
        ONE | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {AUX: [1, 2, 3]}},
        {f"eagle_config.{AUX}": IDS, "eagle_config.use_aux_hidden_state": FLAG},
    ),
    "eagle1": (
        read_eagle,
        ONE | {"architectures": ["LlamaForCausalLMEagle"]},
        {"bias": MAYBE_FLAG, "tie_word_embeddings": FLAG},
    ),
    "speculators eagle3": (
        read_eagle,
        {"speculators_model_type": "eagle3", "transformer_layer_config": ONE},
        EAGLES
        | {f"transformer_layer_config.{name}": takes for name, takes in (COMMON | HEADS).items()}
        | {"transformer_layer_config": OBJECT, AUX: IDS, "lm_head": kind(null=True)},
    ),
    "speculators peagle": (
        read_eagle,
        {"speculators_model_type": "peagle", "transformer_layer_config": ONE, "mask_token_id": 3},
        {"mask_token_id": kind(zero=True)},
    ),
    "steps": (
        eagle.steps,
        {"speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]}},
        {"speculators_config": OBJECT, "speculators_config.proposal_methods": kind(null=True, none=True)},
    ),
}


def changed(fields, path, value):
    """The fields with another value at a dotted path."""
    fields = copy.deepcopy(fields)
    *above, last = path.split(".")
    inner = fields
    for name in above:
        inner = inner.setdefault(name, {})
    inner[last] = value
    return fields


@pytest.mark.parametrize("name", READERS)
def test_a_value_of_a_wrong_kind_is_named(name):
    read, fields, known = READERS[name]
    read(fields)
    wrong = []
    for path, takes in known.items():
        field = path.rsplit(".", 1)[-1]
        for value in WRONG:
            try:
                read(changed(fields, path, value))
            except ValueError as error:
                said = str(error)
                got = repr(value) in said or isinstance(value, list | None)  # a list's length may be what is wrong
                if not takes(value) and not (field in said and got):
                    wrong.append(f"{path} = {value!r}: {said}")
            except Exception as error:  # noqa: BLE001
                wrong.append(f"{path} = {value!r}: {error!r}")
            else:
                if not takes(value):
                    wrong.append(f"{path} = {value!r}: taken")
    assert not wrong, "\n".join(wrong)


def test_a_config_that_names_its_kind_by_other_things_than_texts_is_of_no_kind():
    for name in ("architectures", "speculators_model_type"):
        for value in (*WRONG, [["DFlashDraftModel"]], {"0": "LlamaForCausalLMEagle"}):
            assert not is_block({name: value}) and not eagle.is_eagle({name: value})
    assert is_block(DFLASH) and eagle.is_eagle(ONE | {"architectures": ["LlamaForCausalLMEagle"]})
