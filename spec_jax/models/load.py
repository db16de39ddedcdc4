"""A target from a path: GGUF file, Hugging Face directory, or the name of the default model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from spec_jax.models import layers, llama, qwen_tensors
from spec_jax.models.checkpoint import CheckpointError
from spec_jax.models.gguf import load_gguf
from spec_jax.models.huggingface import load_huggingface
from spec_jax.models.llama import Llama, LlamaParams
from spec_jax.models.qwen import Qwen, QwenParams
from spec_jax.models.qwen_config import QwenConfig
from spec_jax.models.smollm2 import smollm2_path
from spec_jax.models.tokenizer import Tokenizer

_NAMES = {"smollm2": smollm2_path, "small_hybrid": lambda: Path(__file__).with_name("small_hybrid")}


@dataclasses.dataclass(frozen=True)
class LoadedTarget:
    """A target, its parameters, and what else its checkpoint says."""

    target: Llama | Qwen
    params: LlamaParams | QwenParams
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    max_position_embeddings: int


def load_target(path: str | Path, dtype: Any = jnp.float32, stacked: bool | None = None) -> LoadedTarget:
    """Load a model: "smollm2", "small_hybrid", a .gguf file (Llama family), or a directory with config and safetensors.

    The small hybrid is a Qwen3-Next of a few million parameters, trained on Python's standard library; its card stands
    beside its weights in spec_jax/models/small_hybrid.

    A directory's family is its config's model_type: llama, mistral, or one of `qwen_config.MODEL_TYPES`.

    stacked: layers of a kind in one array each and scanned, so that compile time does not grow with depth, or one after
    another in a tuple, which views (`models.views`) need. None: stacked on every backend but CPU, where a scan copies
    each layer's weights before use.

    Raises:
        CheckpointError: for a path that is neither, or a checkpoint that is damaged or of another family.
    """
    place = _NAMES[str(path)]() if str(path) in _NAMES else Path(path)
    if place.is_dir():
        checkpoint = load_huggingface(place)
    elif place.is_file():
        checkpoint = load_gguf(place)
    else:
        raise CheckpointError(
            f"{path}: no such file or directory; takes {', '.join(_NAMES)}, a .gguf file or a model directory"
        )
    config = checkpoint.config
    if isinstance(config, QwenConfig):
        target, params = Qwen(config), qwen_tensors.from_tensors(config, checkpoint.tensors, dtype)
    else:
        target, params = Llama(config), llama.from_tensors(config, checkpoint.tensors, dtype)
    if jax.default_backend() != "cpu" if stacked is None else stacked:
        assert isinstance(params.layers, tuple)
        period = config.period if isinstance(config, QwenConfig) else 1
        params = dataclasses.replace(params, layers=layers.stack(params.layers, period, consume=True))
    tokenizer, eos = checkpoint.tokenizer, checkpoint.eos_token_ids
    return LoadedTarget(target, params, tokenizer, eos, config.max_position_embeddings)
