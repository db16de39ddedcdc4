"""What a Gemma 3 text model is, read from a config.json: a dense `QwenConfig` of full and sliding attention layers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from spec_jax.models.config import RopeConfig, parse, rope_from_hf
from spec_jax.models.fields import kinds_of, number_of, object_of, require, require_only, size_of
from spec_jax.models.qwen_config import ATTENTION, WINDOW, QwenConfig

MODEL_TYPE = "gemma3_text"

SETTINGS: dict[str, Any] = {
    "tie_word_embeddings": True,
    "offset_norms": True,
    "post_norms": True,
    "scaled_embeddings": True,
    "gelu": True,
}
"""What all of them have in common."""

_PATTERN = 6


def layer_types(layers: int, pattern: int = _PATTERN) -> tuple[str, ...]:
    """Every `pattern`th layer sees the whole text."""
    return tuple(WINDOW if (i + 1) % pattern else ATTENTION for i in range(layers))


def from_hf(fields: Mapping[str, Any]) -> QwenConfig:
    """Read a parsed config.json of model type gemma3_text.

    Sizes must be there; other absent fields have transformers' defaults. Rotary parameters are by kind of layer in
    `rope_parameters`, or in the older `rope_theta`, `rope_local_base_freq` and `rope_scaling`, which scales the full
    layers alone. Raises ValueError, naming the field, for anything that would make another model.
    """
    require_only(
        fields,
        ("hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",)),
        ("tie_word_embeddings", True, (True,)),
        ("final_logit_softcapping", None, (None,)),
        ("attn_logit_softcapping", None, (None,)),
        ("use_bidirectional_attention", False, (False,)),
        ("quantization_config", None, (None,)),
    )
    size = functools.partial(size_of, fields)
    layers, positions = size("num_hidden_layers"), size("max_position_embeddings", 131_072)
    kinds = kinds_of(fields, layers) or layer_types(layers, size("sliding_window_pattern", _PATTERN))
    rope, local = _ropes(fields, positions)
    return parse(
        QwenConfig,
        vocab_size=size("vocab_size"),
        hidden_size=size("hidden_size"),
        intermediate_size=size("intermediate_size"),
        num_heads=size("num_attention_heads"),
        num_kv_heads=size("num_key_value_heads"),
        head_dim=size("head_dim", 256),
        layer_types=kinds,
        sparse=(False,) * layers,
        rms_norm_eps=fields.get("rms_norm_eps", 1e-6),
        rope=rope,
        local_rope=local,
        max_position_embeddings=positions,
        attention_bias=fields.get("attention_bias", False),
        sliding_window=size("sliding_window", 4096),
        query_scale=number_of(fields, "query_pre_attn_scalar", 256.0) ** -0.5,
        **SETTINGS,
    )


def _ropes(fields: Mapping[str, Any], positions: int) -> tuple[RopeConfig, RopeConfig]:
    """The rotations of full and of sliding layers."""
    given, kinds = object_of(fields, "rope_parameters"), (ATTENTION, WINDOW)
    if given.keys() >= set(kinds):
        for kind in kinds:
            require(isinstance(given[kind], Mapping), "rope_parameters", given, "an object of objects")
        whole, local = (rope_from_hf({"rope_parameters": given[kind]}, positions) for kind in kinds)
        return whole, local
    require(not given, "rope_parameters", given, f"an object of {ATTENTION} and {WINDOW}")
    whole = rope_from_hf({**fields, "rope_theta": number_of(fields, "rope_theta", 1_000_000.0)}, positions)
    return whole, RopeConfig(theta=number_of(fields, "rope_local_base_freq", 10_000.0))
