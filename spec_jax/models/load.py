"""A target from a path: GGUF file, Hugging Face directory, or the name of the default model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from spec_jax.models.checkpoint import CheckpointError
from spec_jax.models.gguf import load_gguf
from spec_jax.models.huggingface import load_huggingface
from spec_jax.models.llama import Llama, LlamaParams, from_tensors
from spec_jax.models.smollm2 import smollm2_path
from spec_jax.models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class LoadedTarget:
    """A target, its parameters, and what else its checkpoint says."""

    target: Llama
    params: LlamaParams
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    max_position_embeddings: int


def load_target(path: str | Path, dtype: Any = jnp.float32) -> LoadedTarget:
    """Load a Llama-family model: "smollm2", a .gguf file, or a directory with config.json and safetensors.

    Raises:
        CheckpointError: for a path that is neither, or a checkpoint that is damaged or of another family.
    """
    place = smollm2_path() if str(path) == "smollm2" else Path(path)
    if place.is_dir():
        checkpoint = load_huggingface(place)
    elif place.is_file():
        checkpoint = load_gguf(place)
    else:
        raise CheckpointError(f"{path}: no such file or directory; takes 'smollm2', a .gguf file or a model directory")
    config = checkpoint.config
    params = from_tensors(config, checkpoint.tensors, dtype)
    tokenizer, eos = checkpoint.tokenizer, checkpoint.eos_token_ids
    return LoadedTarget(Llama(config), params, tokenizer, eos, config.max_position_embeddings)
