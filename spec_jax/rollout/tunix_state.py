"""A target's sizes and parameters as those of a Tunix Llama 3 or dense Qwen 3: `tunix_models` inverted.

All names are `tunix_models`'s: parameters go where it would read them. Nothing of Tunix is imported here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from spec_jax.models import layers
from spec_jax.models.config import LlamaConfig
from spec_jax.models.linear import RowEmbedding
from spec_jax.models.llama import LlamaParams
from spec_jax.models.qwen import QwenParams
from spec_jax.models.qwen_config import QwenConfig
from spec_jax.rollout.tunix_models import SIZES, TIED, params_of, target_for

FAMILIES = ("Llama3", "Qwen3")


def settings_of(family: str, config: LlamaConfig | QwenConfig) -> dict[str, Any]:
    """A config as the settings of Tunix's `ModelConfig` of a family: the inverse of `target_for`.

    (Tunix 0.1.7's Llama 3 and Qwen 3 rotate by 1,000,000 whatever `rope_theta` says.)

    Raises:
        ValueError: for a family without an inverse, or a config that no model of the family has.
    """
    if family not in FAMILIES:
        raise ValueError(f"family: got {family}, takes one of {', '.join(FAMILIES)}")
    settings: dict[str, Any] = {theirs: getattr(config, ours) for ours, theirs in SIZES.items()}
    settings |= {"num_layers": config.num_layers, "rope_theta": int(config.rope.theta)}
    settings[TIED[family]] = config.tie_word_embeddings
    model = type(family, (), {"config": SimpleNamespace(**settings)})()
    again: Any = target_for(model).config
    if dataclasses.replace(again, max_position_embeddings=config.max_position_embeddings) != config:
        raise ValueError(f"config: got {config}, takes one such as {again}, for Tunix's {family}")
    return settings


def state_of(model: Any, params: LlamaParams | QwenParams, state: Mapping[str, Any]) -> Any:
    """A state that holds copies of parameters: the inverse of `params_of`.

    Args:
        model: the Tunix model, for its family and config.
        params: the target's, in any form in which `load_target` gives them.
        state: the model's state, for its names, shapes and dtypes.

    Raises:
        ValueError: for a family without an inverse, or parameters that are not such a model's.
    """
    if type(model).__name__ not in FAMILIES:
        raise ValueError(f"model: got a {type(model).__name__}, takes one of Tunix's {', '.join(FAMILIES)}")
    params = dataclasses.replace(params, layers=layers.unstack(params.layers))  # pyright: ignore[reportArgumentType]
    slots, count = jax.tree.flatten_with_path(params_of(model, state))[0], len(jax.tree.leaves(params))
    if len(slots) != count:
        raise ValueError(f"params: got {count} arrays, takes {len(slots)}")
    found = {id(slot): (path, _at(params, path)) for path, slot in slots}

    def filled(slot: Array) -> Array:
        path, value = found[id(slot)]
        if value is None or value.size != slot.size:
            got = None if value is None else value.shape
            raise ValueError(f"params{jax.tree_util.keystr(path)}: got {got}, takes what fills {slot.shape}")
        return jnp.array(value.reshape(slot.shape), slot.dtype)

    return jax.tree.map(filled, state)


def _at(params: Any, path: Any) -> Array | None:
    """What stands at a path of `params_of`'s parameters, whose embedding alone has a table; None if nothing does."""
    for key in path:
        if isinstance(key, jax.tree_util.SequenceKey):
            params = params[key.idx]
        elif key.name != "table":
            params = getattr(params, key.name, None)
        else:
            params = params.table if isinstance(params, RowEmbedding) else params.T
    return params
