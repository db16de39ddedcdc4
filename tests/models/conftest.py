"""Tiny Llama checkpoints, written to disk in both formats."""

import dataclasses
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from spec_jax.models.checkpoint import required_tensors
from spec_jax.models.config import LlamaConfig
from spec_jax.models.smollm2 import smollm2_path

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "Ġ Ġ", "1 2"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
TOKENS = SPECIALS + sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in MERGES]


@pytest.fixture
def tiny() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=64,
    )


@pytest.fixture
def make_tensors():
    def make(config: LlamaConfig) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        return {name: rng.standard_normal(shape, np.float32) for name, shape in required_tensors(config).items()}

    return make


@pytest.fixture
def write_gguf(tmp_path: Path, tiny: LlamaConfig, make_tensors):
    """Write a GGUF file as llama.cpp's converter does; `metadata` and `tensors` change or (None) remove entries."""

    def write(config=tiny, metadata=None, tensors=None, weights=None, quantize=(), name="tiny.gguf") -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, "llama")
        types = [3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS))
        fields = {
            "llama.block_count": config.num_layers,
            "llama.context_length": config.max_position_embeddings,
            "llama.embedding_length": config.hidden_size,
            "llama.feed_forward_length": config.intermediate_size,
            "llama.attention.head_count": config.num_heads,
            "llama.attention.head_count_kv": config.num_kv_heads,
            "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "llama.rope.freq_base": config.rope.theta,
            "llama.vocab_size": config.vocab_size,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": TOKENS,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 0,
            "tokenizer.chat_template": TEMPLATE,
        } | (metadata or {})
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        for key, value in fields.items():
            if isinstance(value, list):
                writer.add_array(key, value)
            elif value is not None:
                add[type(value)](key, value)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        for hf_name, array in (make_tensors(config) if weights is None else weights).items():
            n = heads.get(hf_name.split(".")[-2])
            if n is not None:
                array = array.reshape(n, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
            new_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias")) or hf_name
            if new_name in (tensors or {}):
                continue
            if hf_name in quantize:
                kind = gguf.GGMLQuantizationType.Q8_0
                writer.add_tensor(new_name, gguf.quants.quantize(array, kind), raw_dtype=kind)
            else:
                writer.add_tensor(new_name, np.ascontiguousarray(array))
        for new_name, array in (tensors or {}).items():
            if array is not None:
                writer.add_tensor(new_name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def tiny_backend() -> tokenizers.Tokenizer:
    merges = [(merge[: merge.index(" ")], merge[merge.index(" ") + 1 :]) for merge in MERGES]
    backend = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(TOKENS)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return backend


@pytest.fixture
def write_directory(tmp_path: Path, tiny: LlamaConfig, make_tensors):
    """Write a Hugging Face directory; `config`, `tensors` change or (None) remove entries."""

    def write(config=None, tensors=None, tokenizer=True, tokenizer_config=None, shape=tiny) -> Path:
        fields = {
            "model_type": "llama",
            "vocab_size": shape.vocab_size,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "rms_norm_eps": shape.rms_norm_eps,
            "max_position_embeddings": shape.max_position_embeddings,
            "tie_word_embeddings": shape.tie_word_embeddings,
            "attention_bias": shape.attention_bias,
            "mlp_bias": shape.mlp_bias,
            "eos_token_id": 0,
        } | (config or {})
        fields = {key: value for key, value in fields.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        arrays = {name: a for name, a in (make_tensors(shape) | (tensors or {})).items() if a is not None}
        save_file(arrays, tmp_path / "model.safetensors")
        if tokenizer:
            tiny_backend().save(str(tmp_path / "tokenizer.json"))
            entries = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"} | (tokenizer_config or {})
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(entries))
        return tmp_path

    return write


@pytest.fixture
def backend() -> tokenizers.Tokenizer:
    return tiny_backend()


@pytest.fixture
def tied(tiny: LlamaConfig) -> LlamaConfig:
    return dataclasses.replace(tiny, tie_word_embeddings=True)


@pytest.fixture
def biased(tiny: LlamaConfig) -> LlamaConfig:
    return dataclasses.replace(tiny, attention_bias=True, mlp_bias=True)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    try:
        return smollm2_path()
    except FileNotFoundError as error:
        pytest.skip(str(error))
