"""A directory's safetensors: one file, or several with an index that says which tensor is in which."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from spec_jax.models.checkpoint import CheckpointError, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F32", "F16", "BF16")


def weight_files(directory: Path, stored: tuple[str, ...] = FLOATS) -> list[Path]:
    """The safetensors files; where an index names several, they must hold exactly the tensors that it promises.

    Raises CheckpointError for files that are missing, damaged, outside the directory or of other types than `stored`,
    an index that does not fit them, and weights that are there as pickle alone, which is not read.
    """
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if not (directory / INDEX).is_file():
        others = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in directory.glob(kind))
        why = f"; {', '.join(others)} is pickle, which can run code: convert it to safetensors" if others else ""
        raise CheckpointError(f"{directory}: no {SINGLE} and no {INDEX}{why}")
    index = read_json(directory / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise CheckpointError(f"{directory / INDEX}: weight_map is {type(index).__name__}; taken: names to file names")
    files: dict[str, set[str]] = {}
    for name, file in index.items():
        files.setdefault(file, set()).add(name)
    for file in files:
        if Path(file).name != file or not re.fullmatch(r"[^\\\0]+\.safetensors", file):
            raise CheckpointError(
                f"{directory / INDEX}: weight_map names {file!r}; taken: .safetensors files beside it"
            )
    for file, names in files.items():
        if differing := names ^ shapes(directory / file, stored).keys():
            raise CheckpointError(f"{directory / file}: {min(differing)} is in the index or the file, not in both")
    return [directory / file for file in files]


def shapes(path: Path, stored: tuple[str, ...] = FLOATS) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape by name; CheckpointError for one of another type than `stored` (safetensors' names)."""
    found = {}
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118
            entry = file.get_slice(name)
            if (kind := entry.get_dtype()) not in stored:
                raise CheckpointError(f"{path}: {name} is stored as {kind}; taken: {', '.join(stored)}")
            found[name] = tuple(entry.get_shape())
    return found


def read(path: Path, name: str) -> np.ndarray:
    """One tensor, as stored."""
    with _opened(path) as file:
        return file.get_tensor(name)


def read_box(path: Path, name: str, box: tuple[slice, ...]) -> np.ndarray:
    """A box of one tensor, as stored: slices with a start and a stop for every axis. No more of the file is read."""
    with _opened(path) as file:
        entry = file.get_slice(name)
        return entry[box] if box else entry[:]


def _opened(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        return safe_open(str(path), framework="numpy")
    except Exception as error:  # the library's own error, OSError, ...
        raise CheckpointError(f"{path}: not a whole safetensors file: {error}") from error
