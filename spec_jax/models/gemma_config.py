"""What a Gemma 3 text model is, read from a config.json: a dense `QwenConfig` of full and sliding attention layers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from spec_jax.models.config import RopeConfig, parse, require, rope_from_hf, size_of
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
    for name, default, taken in (
        ("hidden_activation", "gelu_pytorch_tanh", "gelu_pytorch_tanh"),
        ("tie_word_embeddings", True, True),
        ("final_logit_softcapping", None, None),
        ("attn_logit_softcapping", None, None),
        ("use_bidirectional_attention", False, False),
        ("quantization_config", None, None),
    ):
        value = fields.get(name, default)
        require(value == taken, name, value, repr(taken))

    size = functools.partial(size_of, fields)
    layers, positions = size("num_hidden_layers"), size("max_position_embeddings", 131_072)
    kinds = fields.get("layer_types") or layer_types(layers, size("sliding_window_pattern", _PATTERN))
    require(len(kinds) == layers, "layer_types", kinds, f"a list of {layers} layers' kinds")
    rope, local = _ropes(fields, positions)
    scalar = fields.get("query_pre_attn_scalar", 256)
    require(isinstance(scalar, int | float) and scalar > 0, "query_pre_attn_scalar", scalar, "a positive number")
    return parse(
        QwenConfig,
        vocab_size=size("vocab_size"),
        hidden_size=size("hidden_size"),
        intermediate_size=size("intermediate_size"),
        num_heads=size("num_attention_heads"),
        num_kv_heads=size("num_key_value_heads"),
        head_dim=size("head_dim", 256),
        layer_types=tuple(kinds),
        sparse=(False,) * layers,
        rms_norm_eps=fields.get("rms_norm_eps", 1e-6),
        rope=rope,
        local_rope=local,
        max_position_embeddings=positions,
        attention_bias=fields.get("attention_bias", False),
        sliding_window=size("sliding_window", 4096),
        query_scale=float(scalar) ** -0.5,
        **SETTINGS,
    )


def _ropes(fields: Mapping[str, Any], positions: int) -> tuple[RopeConfig, RopeConfig]:
    """The rotations of full and of sliding layers."""
    given = fields.get("rope_parameters")
    if isinstance(given, Mapping) and {ATTENTION, WINDOW} <= given.keys():
        both = (rope_from_hf({"rope_parameters": given[kind]}, positions) for kind in (ATTENTION, WINDOW))
        return tuple(both)  # type: ignore[return-value]
    require(given is None, "rope_parameters", given, f"an object of {ATTENTION} and {WINDOW}")
    whole = rope_from_hf({"rope_theta": 1_000_000.0, **fields}, positions)
    return whole, RopeConfig(theta=float(fields.get("rope_local_base_freq", 10_000.0)))
