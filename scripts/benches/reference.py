"""The same weights in transformers, to compare with."""

from __future__ import annotations

from typing import Any

import numpy as np

from spec_jax.models import layers
from spec_jax.models.config import LlamaConfig
from spec_jax.models.llama import LlamaParams
from spec_jax.models.load import LoadedTarget


def to_transformers(model: LoadedTarget) -> Any:
    """A LlamaForCausalLM in float32 that holds a loaded target's weights.

    Raises ModuleNotFoundError without torch or transformers, and ValueError for a model with biases, scaled RoPE, a
    sliding window or a head of its own.
    """
    try:
        import torch
        import transformers
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"{missing.name} is missing: pip install 'spec_jax[reference]'", name=missing.name
        ) from missing
    c, p = model.target.config, model.params
    if not isinstance(c, LlamaConfig) or not isinstance(p, LlamaParams):
        raise ValueError(f"model: got a {type(model.target).__name__}, takes a Llama")
    if c.rope.type != "default" or c.attention_bias or c.mlp_bias or p.head is not None or c.sliding_window:
        raise ValueError("model: got one with scaled RoPE, biases, a window or an untied head, takes one without")
    theirs: Any = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads,
            num_key_value_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            rms_norm_eps=c.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
            max_position_embeddings=c.max_position_embeddings,
            tie_word_embeddings=True,
        )
    ).eval()
    tensor = lambda x: torch.from_numpy(np.array(x))  # noqa: E731
    weights = {"model.embed_tokens.weight": tensor(p.embedding).T, "model.norm.weight": tensor(p.norm)}
    for i, layer in enumerate(layers.unstack(p.layers)):
        at = f"model.layers.{i}"
        weights[f"{at}.input_layernorm.weight"] = tensor(layer.attention_norm)
        weights[f"{at}.post_attention_layernorm.weight"] = tensor(layer.mlp_norm)
        for block, names in (("self_attn", ("q", "k", "v", "o")), ("mlp", ("gate", "up", "down"))):
            for name in names:
                weights[f"{at}.{block}.{name}_proj.weight"] = tensor(getattr(layer, name).kernel).T
    found = theirs.load_state_dict({k: v.contiguous() for k, v in weights.items()}, strict=False)
    assert found.missing_keys in ([], ["lm_head.weight"]) and not found.unexpected_keys, found
    theirs.tie_weights()
    return theirs
