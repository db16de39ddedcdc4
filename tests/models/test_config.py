import dataclasses
import json

import pytest

from spec_jax.models.config import LlamaConfig, RopeConfig

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_reads_sizes_and_defaults():
    config = LlamaConfig.from_hf(LLAMA)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 8)
    assert config.rope == RopeConfig()
    assert not (config.tie_word_embeddings or config.attention_bias or config.mlp_bias)
    assert LlamaConfig.from_hf({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}).num_kv_heads == 4
    assert LlamaConfig.from_hf(LLAMA | {"head_dim": 16}).head_dim == 16
    assert hash(config) == hash(LlamaConfig.from_hf(dict(LLAMA)))


def test_both_spellings_of_the_rotary_parameters_are_the_same():
    old = LlamaConfig.from_hf(LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3})
    new = LlamaConfig.from_hf(LLAMA | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}})
    older = LlamaConfig.from_hf(
        LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type" if k == "rope_type" else k: v for k, v in LLAMA3.items()}}
    )
    assert old == new == older
    assert old.rope == RopeConfig("llama3", 5e5, 8.0, 64, 1.0, 4.0)
    assert LlamaConfig.from_hf(LLAMA | {"rope_theta": 1e6, "rope_scaling": None}).rope == RopeConfig(theta=1e6)


def test_lists_become_hashable_and_lengths_are_filled_in():
    scaling = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = LlamaConfig.from_hf(LLAMA | {"rope_scaling": scaling, "original_max_position_embeddings": 64})
    assert config.rope.factor == 4.0
    assert isinstance(hash(config), int)
    yarn = LlamaConfig.from_hf(LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4.0, "finetuned": True}})
    assert yarn.rope == RopeConfig("yarn", factor=4.0, original_max_position_embeddings=256)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "qwen2"}, "model_type.*qwen2"),
        ({"model_type": None}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act.*gelu"),
        ({"sliding_window": 4096}, "sliding_window.*4096"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"layer_types": 5}, "layer_types is 5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor.*0.5"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_attention_heads": 3}, "hidden_size.*num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_heads.*num_kv_heads"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"rope_theta": 10**400}, "theta"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, "rope type.*mrope"),
        ({"rope_scaling": {"type": ["linear"], "factor": 2.0}}, "type is"),
        ({"rope_scaling": {"type": "linear"}}, "linear.*needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "speed": 1}}, "no parameter speed"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 1}}, "no parameter beta_fast"),
        ({"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}}, "differ"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}}, "differ"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": "64"}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "short_factor has 1"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": 3}}, "long_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    ],
)
def test_refuses_what_would_be_another_model(change, words):
    with pytest.raises(ValueError, match=words):
        LlamaConfig.from_hf(LLAMA | change)


def test_mistral_without_a_window_is_a_llama():
    fields = LLAMA | {"model_type": "mistral", "sliding_window": None, "attention_dropout": 0.0}
    assert LlamaConfig.from_hf(fields) == LlamaConfig.from_hf(LLAMA)
    assert LlamaConfig.from_hf(LLAMA | {"model_type": "mistral"}).sliding_window == 4096


@pytest.mark.parametrize("kind", ["LlamaConfig", "MistralConfig"])
def test_agrees_with_transformers_on_saved_files(kind, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the reference")
    extra = {"sliding_window": None} if kind == "MistralConfig" else {"attention_bias": True}
    reference = getattr(transformers, kind)(
        vocab_size=100, hidden_size=64, num_hidden_layers=3, tie_word_embeddings=True,
        rope_parameters={"rope_type": "yarn", "rope_theta": 3e4, "factor": 2.0}, **extra,
    )  # fmt: skip
    reference.save_pretrained(tmp_path)
    config = LlamaConfig.from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert (config.num_kv_heads, config.head_dim) == (reference.num_key_value_heads, reference.head_dim)
    assert (config.rms_norm_eps, config.max_position_embeddings) == (
        reference.rms_norm_eps,
        reference.max_position_embeddings,
    )
    assert config.rope == RopeConfig("yarn", 3e4, 2.0, reference.max_position_embeddings)
    assert config.attention_bias is (kind == "LlamaConfig")
    assert config.tie_word_embeddings
    bare = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "rms_norm_eps")} | extra
    bare |= {"num_attention_heads": 8, "model_type": reference.model_type}
    assert LlamaConfig.from_hf(bare).num_kv_heads == getattr(transformers, kind)(**bare).num_key_value_heads
    assert LlamaConfig.from_hf(bare).rms_norm_eps == getattr(transformers, kind)(**bare).rms_norm_eps


def test_a_config_made_by_hand_is_checked_too():
    config = LlamaConfig.from_hf(LLAMA)
    with pytest.raises(ValueError, match="num_layers"):
        dataclasses.replace(config, num_layers=0)
    with pytest.raises(ValueError, match="has no parameter factor"):
        RopeConfig(factor=2.0)
