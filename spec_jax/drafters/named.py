"""Parameters by the names that a file has for them. Kernels (paths that end in .kernel) are stored as [out, in]."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.models.checkpoint import CheckpointError

Name = Callable[[str], str | None]
"""A parameter's name in a file by its path; None: the file has no place for it, and it is 1."""


@contextlib.contextmanager
def reading_config(source: str | Path) -> Iterator[None]:
    """What is wrong with a config.json's fields as a CheckpointError that names the file."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{Path(source) / 'config.json'}: {error}") from error


def paths(tree: Any) -> list[str]:
    """The path of every leaf, as in layers.0.q.kernel."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]


def file_shapes(shapes: Any, name: Name) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in the file, of parameters given as arrays or shapes."""
    pairs = zip(paths(shapes), jax.tree.leaves(shapes), strict=True)
    turned = lambda path, shape: shape[::-1] if path.endswith(".kernel") else shape  # noqa: E731
    return {str(name(path)): turned(path, leaf.shape) for path, leaf in pairs if name(path) is not None}


def from_file(shapes: Any, name: Name, tensors: Mapping[str, np.ndarray], dtype: Any) -> Any:
    """The parameters, of tensors that were checked (see `files.check_names`)."""
    leaves, structure = jax.tree.flatten(shapes)

    def made(path: str, leaf: Any) -> jax.Array:
        known = name(path)
        if known is None:
            return jnp.ones(leaf.shape, leaf.dtype)
        tensor = tensors[known]
        tensor = tensor.T if path.endswith(".kernel") else tensor
        return jnp.asarray(tensor.reshape(leaf.shape)).astype(dtype)

    return structure.unflatten([made(*pair) for pair in zip(paths(shapes), leaves, strict=True)])


def to_file(params: Any, name: Name) -> dict[str, np.ndarray]:
    """The tensors; ValueError for a parameter that the file has no place for, unless it is 1."""
    found = {}
    for path, leaf in zip(paths(params), jax.tree.leaves(params), strict=True):
        known, array = name(path), np.asarray(leaf)
        if known is not None:
            found[known] = array.T if path.endswith(".kernel") else array
        elif not (array == 1).all():
            raise ValueError(f"params: got a {path} other than 1, which the format has no place for")
    return found
