"""Models that draft over masks, in directories: ours, and PARD's published ones (an ordinary model and a mask).

Published: a Hugging Face directory whose config.json has `pard_token`, the mask's id.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from spec_jax.drafters import own_files
from spec_jax.drafters.named import reading_config
from spec_jax.drafters.parallel_model import ParallelConfig
from spec_jax.models.checkpoint import CheckpointError
from spec_jax.models.config import LlamaConfig
from spec_jax.models.fields import token_of
from spec_jax.models.layers import unstack
from spec_jax.models.load import abstract_params, load_target
from spec_jax.models.qwen_config import QwenConfig

FORMAT = "spec_jax.parallel"
_FAMILIES = {"llama": LlamaConfig, "qwen": QwenConfig}


def is_published(fields: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a published PARD model."""
    return "pard_token" in fields


def from_published(source: str | Path, fields: Mapping[str, Any], dtype: Any = jnp.float32) -> tuple[Any, Any]:
    """A published model's config and parameters. Raises as `load_target`; CheckpointError for a mask that is none."""
    loaded = load_target(source, dtype, stacked=False)
    with reading_config(source):
        model = loaded.target.config
        config = ParallelConfig(model, token_of(fields, "pard_token", model.vocab_size))
    return config, loaded.params


def save(directory: str | Path, config: ParallelConfig, params: Any, target: str, dtype: Any = None) -> None:
    """Write a model and its mask; `target` is what it was trained for. Layers are written one by one."""
    family = next(name for name, kind in _FAMILIES.items() if isinstance(config.model, kind))
    network = {"family": family, "model": dataclasses.asdict(config.model)}
    network |= {"mask_token": config.mask_token, "depth": config.depth}
    whole = dataclasses.replace(params, layers=unstack(params.layers))
    own_files.save(directory, FORMAT, {"network": network}, whole, dtype, target)


def from_tensors(
    source: str | Path, fields: Mapping[str, Any], tensors: Mapping[str, np.ndarray], dtype: Any = jnp.float32
) -> tuple[ParallelConfig, Any]:
    """What `save` wrote: config and parameters. Raises CheckpointError for anything else."""
    try:
        own_files.check_fields(fields, "network")
        network = fields["network"]
        model = own_files.config(_FAMILIES[network["family"]], network["model"])
        config = ParallelConfig(model, network["mask_token"], network["depth"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{Path(source) / 'config.json'}: not a parallel model's: {error!r}") from error
    return config, own_files.read(source, tensors, abstract_params(config.model, dtype), dtype)
