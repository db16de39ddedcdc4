"""Llama-family checkpoints in llama.cpp's GGUF format, dequantised to float32."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spec_jax.models.checkpoint import Checkpoint, CheckpointError, LazyTensor, validate
from spec_jax.models.config import LlamaConfig, RopeConfig, parse
from spec_jax.models.gguf_file import GgufFile, GgufTensor, read_gguf
from spec_jax.models.gguf_tokenizer import build_tokenizer
from spec_jax.models.tokenizer import Tokenizer

_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(\w+)\.(weight|bias)")
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_DIVISORS = "rope_freqs.weight"
_KEYS = set(
    "block_count context_length embedding_length feed_forward_length vocab_size attention.head_count "
    "attention.head_count_kv attention.key_length attention.value_length attention.layer_norm_rms_epsilon "
    "rope.freq_base rope.dimension_count rope.scale_linear rope.scaling.type rope.scaling.factor "
    "rope.scaling.original_context_length rope.scaling.finetuned rope.scaling.yarn_beta_fast "
    "rope.scaling.yarn_beta_slow".split()
)
_NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.sliding_window": 0, "rope.scaling.attn_factor": 1}


def load_gguf(path: str | Path, tokenizer: Tokenizer | None = None) -> Checkpoint:
    """Read a GGUF file of architecture llama. `tokenizer` replaces the file's own, for kinds that can't be rebuilt.

    llama.cpp's row order of the query and key maps is turned back into Hugging Face's. Tensors are read when they are
    used. Raises FileNotFoundError, or CheckpointError if the file is damaged, contradicts itself, or holds something
    that would be another model.
    """
    path = Path(path)
    file = read_gguf(path)
    try:
        config = _config(file)
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and len(tokens) != config.vocab_size:
            raise CheckpointError(f"{len(tokens)} tokens, but a vocabulary of {config.vocab_size}")
        tokenizer = tokenizer or build_tokenizer(file.metadata)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in file.tensors.items():
        if name == _ROPE_DIVISORS:
            continue
        new_name, read = _NAMES.get(name), tensor.read
        match = _LAYER.fullmatch(name)
        if match and match[2] in _LAYER_NAMES:
            layer, part, kind = match.groups()
            new_name = f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
            if part in heads:
                read = functools.partial(_unpermuted, tensor, heads[part])
        if new_name is None:  # not to be taken for the tensor that has this name in another format
            new_name = f"{name} (no name of a llama's tensor)"
        tensors[new_name] = LazyTensor(tensor.shape, np.dtype(np.float32), read)
    eos_token_ids = tokenizer.eos_token_ids if tokenizer else ()
    checkpoint = Checkpoint(config, tensors, tokenizer, eos_token_ids, path)
    validate(checkpoint)
    return checkpoint


def _unpermuted(tensor: GgufTensor, heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of the two halves of each head's rows."""
    rows = tensor.read()
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _config(file: GgufFile) -> LlamaConfig:
    metadata, tensors = file.metadata, file.tensors
    if (architecture := metadata.get("general.architecture")) != "llama":
        raise CheckpointError(f"general.architecture is {architecture!r}; taken: 'llama'")
    given = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    for key, value in given.items():
        if key not in _KEYS and not (key in _NEUTRAL and value == _NEUTRAL[key]):
            raise CheckpointError(f"llama.{key} is {value!r}, which is not supported")
    if (parts := metadata.get("split.count", 1)) != 1:
        raise CheckpointError(f"one of {parts} files; taken: a model in one file (llama-gguf-split --merge joins them)")

    def need(key: str) -> Any:
        if key not in given:
            raise CheckpointError(f"llama.{key} is missing")
        return given[key]

    tokens = metadata.get("tokenizer.ggml.tokens")
    heads, hidden = need("attention.head_count"), need("embedding_length")
    if not (isinstance(heads, int) and isinstance(hidden, int) and 0 < heads <= hidden):
        raise CheckpointError(
            f"llama.attention.head_count is {heads!r}; taken: a number up to embedding_length, {hidden!r}"
        )
    head_dim = given.get("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if given.get(key, head_dim) != head_dim:
            raise CheckpointError(f"llama.{key} is {given[key]!r}; taken: the length of a head, {head_dim}")
    config = parse(
        LlamaConfig,
        vocab_size=given.get("vocab_size", len(tokens) if isinstance(tokens, list) else None),
        hidden_size=hidden,
        intermediate_size=need("feed_forward_length"),
        num_layers=need("block_count"),
        num_heads=heads,
        num_kv_heads=given.get("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=need("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=need("context_length"),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias=_biased(tensors, ("attn_q", "attn_k", "attn_v", "attn_output")),
        mlp_bias=_biased(tensors, ("ffn_gate", "ffn_up", "ffn_down")),
    )
    return dataclasses.replace(config, rope=_rope(given, config, tensors.get(_ROPE_DIVISORS)))


def _biased(tensors: Mapping[str, Any], parts: tuple[str, ...]) -> bool:
    """Whether any of these maps has a bias in any layer: then all must have theirs."""
    found = filter(None, map(_LAYER.fullmatch, tensors))
    return any(match[2] in parts and match[3] == "bias" for match in found)


def _rope(given: Mapping[str, Any], config: LlamaConfig, divisors: GgufTensor | None) -> RopeConfig:
    theta, trained = given.get("rope.freq_base", 10000.0), config.max_position_embeddings
    factor = given.get("rope.scaling.factor", given.get("rope.scale_linear"))
    kind = given.get("rope.scaling.type", "linear" if factor else "none")
    if divisors is not None:  # one per frequency: how the converter writes the llama3 rule
        if kind != "none" or divisors.shape != (config.head_dim // 2,):
            raise CheckpointError(f"{_ROPE_DIVISORS} has shape {divisors.shape}, rope scaling type is {kind!r}; taken: "
                                  f"({config.head_dim // 2},) and none")  # fmt: skip
        scale = tuple(map(float, divisors.read()))
        found = {"type": "longrope", "factor": 1.0, "original_max_position_embeddings": trained}
        found |= {"short_factor": scale, "long_factor": scale}
    elif kind == "none" and factor in (None, 0, 1):
        found = {}
    elif kind == "linear":
        found = {"type": kind, "factor": factor}
    elif kind == "yarn":
        original = given.get("rope.scaling.original_context_length", trained)
        found = {"type": kind, "factor": factor, "original_max_position_embeddings": original}
        found |= {name: given.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    else:
        raise CheckpointError(f"llama.rope.scaling.type is {kind!r} with factor {factor}; taken: none, linear, yarn")
    return parse(RopeConfig, theta=theta, **found)
