"""Medusa and Hydra heads in directories: Medusa's own names, and for Hydra names after its authors' modules."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.drafters.block.ends import ends_of
from spec_jax.drafters.block.names import LAYER
from spec_jax.drafters.files import check_names, layer_fields, renamed, write_directory
from spec_jax.drafters.medusa import MedusaConfig, MedusaParams, init_params
from spec_jax.drafters.named import file_shapes, from_file, reading_config, to_file
from spec_jax.models.config import LlamaConfig
from spec_jax.models.fields import flag_of, object_of, require, require_only, size_of


def is_medusa(fields: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of Medusa or Hydra heads."""
    return "medusa_num_heads" in fields or "hydra_num_heads" in fields


def from_tensors(
    source: str | Path,
    fields: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    target: Any,
    target_params: Any,
    dtype: Any = jnp.float32,
) -> tuple[MedusaConfig, MedusaParams]:
    """The heads of a directory, over a target (a `Llama` or `Qwen`) and its parameters.

    Raises:
        CheckpointError: naming tensors that are missing, unexpected or misshapen, or fields that do not fit.
    """
    kind = "medusa" if "medusa_num_heads" in fields else "hydra"
    tensors = renamed(source, tensors, lambda name: name.removeprefix("medusa_head."))
    with reading_config(source):
        both = "medusa_num_heads" in fields and "hydra_num_heads" in fields
        require(not both, "hydra_num_heads", fields.get("hydra_num_heads"), "nothing with medusa_num_heads")
        same = [(name, None, (None, getattr(target.config, name))) for name in ("vocab_size", "hidden_size")]
        layer = object_of(fields, "prefix_config")
        arch = ("hydra_head_arch", None, (None, "prefix-mlp" if layer else "mlp"))
        require_only(fields, *same, arch, ("grounded_heads", None, (None, True)))
        config = MedusaConfig(
            target.config.vocab_size,
            target.config.hidden_size,
            size_of(fields, f"{kind}_num_heads"),
            size_of(fields, f"{kind}_num_layers", 1),
            sequential=kind == "hydra",
            final_norm_eps=target.config.rms_norm_eps,
            own_head=flag_of(fields, "own_head", True),
            prefix=LlamaConfig.from_hf(layer) if layer else None,
        )
        ends = ends_of(target_params)
        shapes = jax.eval_shape(lambda key: init_params(config, key, ends), jax.random.key(0))
    own, name = (shapes.blocks, shapes.outputs, shapes.prefix), functools.partial(_name, config)
    check_names(source, tensors, file_shapes(own, name))
    blocks, outputs, prefix = from_file(own, name, tensors, dtype)
    return config, MedusaParams(blocks, outputs, ends, prefix)


def save(directory: str | Path, config: MedusaConfig, params: MedusaParams, target: str, dtype: Any = None) -> None:
    """Write a directory that `drafters.load.load_drafter` reads; `target` is what the heads were trained for."""
    tensors = to_file((params.blocks, params.outputs, params.prefix), functools.partial(_name, config))
    tensors = tensors if dtype is None else {name: x.astype(dtype) for name, x in tensors.items()}
    kind = "hydra" if config.sequential else "medusa"
    fields: dict[str, Any] = {f"{kind}_num_heads": config.num_heads, f"{kind}_num_layers": config.num_blocks}
    fields |= {} if config.own_head else {"own_head": False}
    if config.prefix is not None:
        fields |= {
            "hydra_head_arch": "prefix-mlp",
            "prefix_config": {"model_type": "llama", **layer_fields(config.prefix)},
        }
    write_directory(directory, fields | {"base_model_name_or_path": target}, tensors)


def _name(config: MedusaConfig, path: str) -> str:
    """A parameter's name: paths begin with 0 for the blocks, 1 for the maps to logits, 2 for Hydra++'s layer."""
    if path == "2.norm":
        return "prefix_embeding_layer.norm.weight"
    part, head, rest = path.split(".", 2)
    if part == "2":
        return f"prefix_embeding_layer.layers.0.{LAYER[rest]}"
    rest = rest.replace("kernel", "weight")
    if part == "1":
        return f"hydra_lm_head.{head}.{rest}" if config.sequential else f"{head}.{config.num_blocks}.{rest}"
    return f"hydra_mlp.{head}.{rest.replace('short', 'res_connection')}" if config.sequential else f"{head}.{rest}"
