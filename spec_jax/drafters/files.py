"""A drafter's directory: config.json and safetensors, read whole and checked by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from spec_jax.models.checkpoint import CheckpointError, read_json

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_STORED = ("F32", "F16", "BF16", "I64", "I32", "BOOL", "U8")


def read_directory(directory: str | Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """config.json's fields, and every tensor by name, as stored.

    Raises FileNotFoundError for no such directory, and CheckpointError for a missing, damaged or contradictory file. No
    code in the directory is run; files that could hold code (pickles) are not read.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no such directory")
    fields = read_json(directory / "config.json")
    tensors: dict[str, np.ndarray] = {}
    for path in _weight_files(directory):
        for name, tensor in _read(path):
            if name in tensors:
                raise CheckpointError(f"{path}: {name} is in another file too")
            tensors[name] = tensor
    return fields, tensors


def write_directory(directory: str | Path, fields: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """config.json and model.safetensors in a directory, which is made if it is not there."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, directory / _SINGLE)
    (directory / "config.json").write_text(json.dumps(dict(fields), indent=2) + "\n", encoding="utf-8")


def layer_fields(c: Any) -> dict[str, Any]:
    """What a drafter's config.json says of its decoder layers, whatever the drafter: sizes, norms and rope of `c`."""
    rope = {k: v for k, v in dataclasses.asdict(c.rope).items() if v is not None and k not in ("type", "theta")}
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        "max_position_embeddings": c.max_position_embeddings,
        "rope_parameters": {"rope_type": c.rope.type, "rope_theta": c.rope.theta, **rope},
        "tie_word_embeddings": False,
    }


def check_names(source: str | Path, tensors: Mapping[str, np.ndarray], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """CheckpointError naming every missing, unexpected or misshapen tensor."""
    missing = [name for name in wanted if name not in tensors]
    unexpected = [name for name in tensors if name not in wanted]
    wrong = [
        f"{name} {list(tensors[name].shape)}, not {list(shape)}"
        for name, shape in wanted.items()
        if name in tensors and tensors[name].shape != shape
    ]
    kinds = (("missing tensors", missing), ("unexpected tensors", unexpected), ("wrong tensors", wrong))
    problems = [f"{kind}: {', '.join(names)}" for kind, names in kinds if names]
    if problems:
        raise CheckpointError(f"{source}: {'; '.join(problems)}")


def kept_tokens(source: str | Path, d2t: np.ndarray, t2d: np.ndarray | None, vocab_size: int) -> np.ndarray:
    """The target id of each token of a reduced vocabulary: d2t holds offsets, t2d says which target tokens are kept.

    Raises CheckpointError for ids outside the vocabulary, tokens twice, or a t2d of other tokens.
    """
    kept = np.arange(len(d2t)) + d2t.astype(np.int64)
    if kept.min(initial=0) < 0 or kept.max(initial=0) >= vocab_size or len(set(kept.tolist())) != len(kept):
        raise CheckpointError(f"{source}: d2t leads to ids twice, or outside 0 .. {vocab_size - 1}")
    if t2d is not None and not np.array_equal(np.flatnonzero(t2d), np.sort(kept)):
        raise CheckpointError(f"{source}: t2d keeps other tokens than d2t leads to")
    return kept.astype(np.int32)


def _weight_files(directory: Path) -> list[Path]:
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    if not (directory / _INDEX).is_file():
        others = sorted(p.name for kind in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in directory.glob(kind))
        why = f"; {', '.join(others)} is pickle, which can run code: convert it to safetensors" if others else ""
        raise CheckpointError(f"{directory}: no {_SINGLE} and no {_INDEX}{why}")
    index = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(f, str) and Path(f).name == f for f in index.values()):
        raise CheckpointError(f"{directory / _INDEX}: weight_map does not lead from names to files beside it")
    return [directory / file for file in sorted(set(index.values()))]


def _read(path: Path) -> list[tuple[str, np.ndarray]]:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        with safe_open(str(path), framework="numpy") as file:
            found = []
            for name in file.keys():  # noqa: SIM118
                stored = file.get_slice(name).get_dtype()
                if stored not in _STORED:
                    raise CheckpointError(f"{path}: {name} is stored as {stored}; taken: {', '.join(_STORED)}")
                found.append((name, file.get_tensor(name)))
            return found
    except CheckpointError:
        raise
    except Exception as error:  # the library's own error, OSError, ...
        raise CheckpointError(f"{path}: not a whole safetensors file: {error}") from error
