"""The sizes of a small Qwen3-Next with an MTP head, under transformers' names, and its config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from spec_jax.models.qwen_config import ATTENTION, QwenConfig

# Sparse experts in every layer, attention in every full_attention_interval-th one.
SIZES: dict[str, int | float] = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
}


def config(entries: Iterable[str] = ()) -> QwenConfig:
    """SIZES, with those of `entries` ("hidden_size=64") in place of the defaults; embedding and head are tied.

    Raises ValueError for a name or number that is none, and for sizes that do not fit together.
    """
    sizes = dict(SIZES)
    for entry in entries:
        name, _, value = entry.partition("=")
        try:
            sizes[name] = type(SIZES[name])(value)
        except (KeyError, ValueError) as wrong:
            raise ValueError(f"--size: got {entry!r}, takes NAME=NUMBER with a name of {', '.join(SIZES)}") from wrong
    hybrid = QwenConfig.from_hf({"model_type": "qwen3_next", "tie_word_embeddings": True, **sizes})
    return dataclasses.replace(hybrid, mtp=True)


def to_hf(config: QwenConfig, eos_token_id: int) -> dict[str, Any]:
    """The model's config.json; ValueError for a config that no qwen3_next has."""
    interval = config.layer_types.index(ATTENTION) + 1 if ATTENTION in config.layer_types else config.num_layers
    return {
        **config.to_hf(),
        "full_attention_interval": interval,
        "intermediate_size": config.intermediate_size or config.moe_intermediate_size,
        "attention_dropout": 0.0,
        "num_nextn_predict_layers": int(config.mtp),
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "dtype": "float32",
    }
