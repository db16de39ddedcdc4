"""Trained parameters as one safetensors file: each array under its path in the tree, with a word about the run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file


def save(path: str | Path, params: Any, about: Mapping[str, Any], dtype: Any = None) -> None:
    """Write a tree of arrays; floating-point ones in `dtype` (float32, float16), if it is given."""
    arrays = {}
    for name, x in _named(params).items():
        x = np.asarray(x)
        narrow = dtype is not None and np.issubdtype(x.dtype, np.floating)
        arrays[name] = np.ascontiguousarray(x.astype(dtype) if narrow else x)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    save_file(arrays, part, {"about": json.dumps(dict(about))})
    os.replace(part, path)


def load(path: str | Path, like: Any) -> Any:
    """The arrays of a file in the structure, shapes and types of `like` (arrays, or their shapes).

    Raises FileNotFoundError, or ValueError naming every array that is missing, left over, or of another shape.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"path: {path} is no file")
    wanted = _named(like)
    with safe_open(path, "numpy") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    problems = [f"missing {name}" for name in wanted.keys() - found.keys()]
    problems += [f"left over {name}" for name in found.keys() - wanted.keys()]
    both = sorted(wanted.keys() & found.keys())
    problems += [f"{n} {found[n].shape}, not {wanted[n].shape}" for n in both if found[n].shape != wanted[n].shape]
    if problems:
        raise ValueError(f"path: {path} does not hold what is asked for: {'; '.join(sorted(problems))}")
    leaves = [jnp.asarray(found[name], x.dtype) for name, x in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def about(path: str | Path) -> dict[str, Any]:
    """What the file says about the run."""
    with safe_open(path, "numpy") as file:
        return json.loads((file.metadata() or {}).get("about", "{}"))


def _named(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in jax.tree.leaves_with_path(tree)}
