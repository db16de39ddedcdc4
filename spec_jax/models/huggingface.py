"""Checkpoints as Hugging Face directories: config.json, safetensors, tokenizer.json."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spec_jax.models import gemma_config, shards
from spec_jax.models.checkpoint import DTYPES, Checkpoint, CheckpointError, LazyTensor, read_json, validate
from spec_jax.models.config import LlamaConfig
from spec_jax.models.qwen_config import MODEL_TYPES, WRAPPERS, QwenConfig
from spec_jax.models.qwen_shapes import canonical_names
from spec_jax.models.tokenizer import Tokenizer


def load_huggingface(directory: str | Path, dtype: Any = np.float32) -> Checkpoint:
    """Read a local directory. Tensors, or parts of them, are read when they are used, as `dtype` (float32, bfloat16).

    The tokenizer is None if there is no tokenizer.json. The ids that end a text are those of generation_config.json,
    else config.json, else the tokenizer. Raises FileNotFoundError for no such directory, or CheckpointError if
    something is missing, damaged, contradictory or would be another model. No code in the directory is run.
    """
    directory, dtype = Path(directory), np.dtype(dtype)
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}; taken: float32, bfloat16")
    described = load_description(directory)
    config = described.config
    tensors = {
        name: LazyTensor(shape, dtype, *(functools.partial(f, path, name, dtype) for f in (_read, _read_box)))
        for path in shards.weight_files(directory)
        for name, shape in shards.shapes(path).items()
    }
    if isinstance(config, QwenConfig):
        if read_json(directory / "config.json")["model_type"] in WRAPPERS:
            tensors = canonical_names(tensors)
        config = dataclasses.replace(config, mtp=any(name.startswith("mtp.") for name in tensors))
    checkpoint = dataclasses.replace(described, config=config, tensors=tensors)
    validate(checkpoint)
    return checkpoint


def load_description(directory: Path) -> Checkpoint:
    """What a directory says beside its weights: config and tokenizer, and no tensors. Raises as `load_huggingface`."""
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no such directory")
    fields = read_json(directory / "config.json")
    try:
        config = _config(fields)
    except ValueError as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}") from error
    ends = _eos_token_ids(directory / "generation_config.json", directory / "config.json")
    has_tokenizer = (directory / "tokenizer.json").exists()
    tokenizer = Tokenizer.from_directory(directory, ends) if has_tokenizer else None
    return Checkpoint(config, {}, tokenizer, tokenizer.eos_token_ids if tokenizer else ends, directory)


def _config(fields: Mapping[str, Any]) -> LlamaConfig | QwenConfig:
    """The config of any family; ValueError, naming the field, for what is none or would be another model."""
    model_type = fields.get("model_type")
    if model_type in MODEL_TYPES:
        return QwenConfig.from_hf(fields)
    if model_type == gemma_config.MODEL_TYPE:
        return gemma_config.from_hf(fields)
    taken = ("llama", "mistral", *MODEL_TYPES, gemma_config.MODEL_TYPE)
    if model_type not in taken:
        raise ValueError(f"model_type is {model_type!r}; taken: {', '.join(taken)}")
    return LlamaConfig.from_hf(fields)


def _read(path: Path, name: str, dtype: np.dtype) -> np.ndarray:
    return shards.read(path, name).astype(dtype, copy=False)


def _read_box(path: Path, name: str, dtype: np.dtype, box: tuple[slice, ...]) -> np.ndarray:
    return shards.read_box(path, name, box).astype(dtype, copy=False)


def _eos_token_ids(*paths: Path) -> tuple[int, ...]:
    for path in paths:
        fields = read_json(path) if path.exists() else {}
        text = fields.get("text_config")
        value = fields.get("eos_token_id", text.get("eos_token_id") if isinstance(text, dict) else None)
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
                raise CheckpointError(f"{path}: eos_token_id is {value!r}; taken: a token id or a list of them")
            return tuple(ids)
    return ()
