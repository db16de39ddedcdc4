"""Recurrent heads in directories of our own format."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.drafters import medusa, own_files, recurrent
from spec_jax.drafters.block.ends import ends_of
from spec_jax.drafters.named import reading_config
from spec_jax.drafters.recurrent import RecurrentConfig, RecurrentParams
from spec_jax.models.fields import is_size

FORMAT = "spec_jax.recurrent"


def save(
    directory: str | Path,
    config: RecurrentConfig,
    params: RecurrentParams,
    target: str,
    dtype: Any = None,
    steps: int = 5,
) -> None:
    """Write a head, and nothing of the target, which `target` names; steps: how many tokens it was trained to draft."""
    fields = {"network": dataclasses.asdict(config), "steps": steps}
    own_files.save(directory, FORMAT, fields, medusa.own_parts(params), dtype, target)


def from_tensors(
    source: str | Path,
    fields: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    target: Any,
    target_params: Any,
    dtype: Any = jnp.float32,
) -> tuple[RecurrentConfig, RecurrentParams, int]:
    """What `save` wrote, over a target (a `Llama` or `Qwen`) and its parameters: config, parameters, steps.

    Raises CheckpointError for anything else, or a head of another target.
    """
    with reading_config(source):
        own_files.check_fields(fields, "network", "steps")
        network: Any = fields.get("network")
        steps: Any = fields.get("steps")
        if not isinstance(network, Mapping) or not is_size(steps):
            raise ValueError(f"network, steps: got {network!r} and {steps!r}, takes sizes and a number of tokens")
        config = own_files.config(RecurrentConfig, network)
        medusa.tapped(config, target)
    ends = ends_of(target_params)
    shapes = jax.eval_shape(lambda key: recurrent.init_params(config, key, ends), jax.random.key(0))
    own = own_files.read(source, tensors, medusa.own_parts(shapes), dtype)
    return config, RecurrentParams(**own, ends=ends), steps
