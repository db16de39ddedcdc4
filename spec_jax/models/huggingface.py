"""Checkpoints as Hugging Face directories: config.json, safetensors, tokenizer.json."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from spec_jax.models.checkpoint import DTYPES, Checkpoint, CheckpointError, LazyTensor, read_json, validate
from spec_jax.models.config import LlamaConfig
from spec_jax.models.qwen_config import MODEL_TYPES, WRAPPERS, QwenConfig
from spec_jax.models.qwen_shapes import canonical_names
from spec_jax.models.tokenizer import Tokenizer

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_STORED = ("F32", "F16", "BF16")


def load_huggingface(directory: str | Path, dtype: Any = np.float32) -> Checkpoint:
    """Read a local directory. Tensors are read, as `dtype` (float32 or bfloat16), when they are used.

    The tokenizer is None if there is no tokenizer.json. The ids that end a text are those of generation_config.json,
    else config.json, else the tokenizer. Raises FileNotFoundError for no such directory, or CheckpointError if
    something is missing, damaged, contradictory or would be another model. No code in the directory is run.
    """
    directory, dtype = Path(directory), np.dtype(dtype)
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}; taken: float32, bfloat16")
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no such directory")
    fields = read_json(directory / "config.json")
    try:
        config = _config(fields)
    except ValueError as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}") from error
    tensors = {
        name: LazyTensor(tuple(shape), dtype, functools.partial(_read, path, name, dtype))
        for path in _weight_files(directory)
        for name, shape in _shapes(path).items()
    }
    if isinstance(config, QwenConfig):
        if fields["model_type"] in WRAPPERS:
            tensors = canonical_names(tensors)
        config = dataclasses.replace(config, mtp=any(name.startswith("mtp.") for name in tensors))
    ends = _eos_token_ids(directory / "generation_config.json", directory / "config.json")
    has_tokenizer = (directory / "tokenizer.json").exists()
    tokenizer = Tokenizer.from_directory(directory, ends) if has_tokenizer else None
    checkpoint = Checkpoint(config, tensors, tokenizer, tokenizer.eos_token_ids if tokenizer else ends, directory)
    validate(checkpoint)
    return checkpoint


def _config(fields: Mapping[str, Any]) -> LlamaConfig | QwenConfig:
    """The config of any family; ValueError, naming the field, for what is none or would be another model."""
    model_type = fields.get("model_type")
    if model_type in MODEL_TYPES:
        return QwenConfig.from_hf(fields)
    if model_type not in ("llama", "mistral"):
        raise ValueError(f"model_type is {model_type!r}; taken: llama, mistral, {', '.join(MODEL_TYPES)}")
    return LlamaConfig.from_hf(fields)


def _weight_files(directory: Path) -> list[Path]:
    """The safetensors files; a sharded model's must hold exactly the tensors that its index promises."""
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    if not (directory / _INDEX).is_file():
        others = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in directory.glob(kind))
        why = f"; {', '.join(others)} is pickle, which can run code: convert it to safetensors" if others else ""
        raise CheckpointError(f"{directory}: no {_SINGLE} and no {_INDEX}{why}")
    index = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise CheckpointError(f"{directory / _INDEX}: weight_map is {type(index).__name__}; taken: names to file names")
    files: dict[str, set[str]] = {}
    for name, file in index.items():
        files.setdefault(file, set()).add(name)
    for file, names in files.items():
        if Path(file).name != file or not re.fullmatch(r"[^\\\0]+\.safetensors", file):
            raise CheckpointError(
                f"{directory / _INDEX}: weight_map names {file!r}; taken: .safetensors files beside it"
            )
        if differing := names ^ _shapes(directory / file).keys():
            raise CheckpointError(f"{directory / file}: {min(differing)} is in the index or the file, not in both")
    return [directory / file for file in files]


def _shapes(path: Path) -> Mapping[str, list[int]]:
    shapes = {}
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118
            entry = file.get_slice(name)
            if (stored := entry.get_dtype()) not in _STORED:
                raise CheckpointError(f"{path}: {name} is stored as {stored}; taken: {', '.join(_STORED)}")
            shapes[name] = entry.get_shape()
    return shapes


def _read(path: Path, name: str, dtype: np.dtype) -> np.ndarray:
    with _opened(path) as file:
        return file.get_tensor(name).astype(dtype, copy=False)


def _opened(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        return safe_open(str(path), framework="numpy")
    except Exception as error:  # the library's own error, OSError, ...
        raise CheckpointError(f"{path}: not a whole safetensors file: {error}") from error


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
