"""Our own format of drafters: config.json says what it is, and tensors are named by their place in the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.drafters.files import check_names, write_directory
from spec_jax.drafters.named import paths
from spec_jax.models.config import RopeConfig
from spec_jax.models.linear import straight

T = TypeVar("T")


def save(
    directory: str | Path,
    form: str,
    fields: Mapping[str, Any],
    parts: Any,
    dtype: Any = None,
    target: str | None = None,
) -> None:
    """Write a tree of parameters and the config's fields. Kernels are stored [in, out], however they are held.

    form: the format's name. dtype: that of floating-point tensors in the file, the parameters' own if None. target:
    what they were trained for.
    """
    tensors, parts = {}, straight(parts)
    for name, leaf in zip(paths(parts), jax.tree.leaves(parts), strict=True):
        array = np.asarray(leaf)
        floating = jnp.issubdtype(array.dtype, jnp.floating)
        tensors[name] = array.astype(dtype) if dtype is not None and floating else array
    about = {} if target is None else {"target": target}
    write_directory(directory, {"format": form, **fields, **about}, tensors)


def read(source: str | Path, tensors: Mapping[str, np.ndarray], template: Any, dtype: Any = jnp.float32) -> Any:
    """The tensors in the structure of `template` (arrays, or their shapes), floating-point ones as `dtype`.

    dtype: None takes the template's own types.

    Raises CheckpointError naming every missing, unexpected or misshapen tensor, or one of another kind of number.
    """
    template = jax.eval_shape(straight, template)
    names, leaves = paths(template), jax.tree.leaves(template)
    real = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
    whole = [name for name, is_real in zip(names, real, strict=True) if not is_real]
    check_names(source, tensors, {name: leaf.shape for name, leaf in zip(names, leaves, strict=True)}, whole)
    kinds = [leaf.dtype if dtype is None or not r else dtype for leaf, r in zip(leaves, real, strict=True)]
    found = [jnp.asarray(tensors[name]).astype(kind) for name, kind in zip(names, kinds, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(template), found)


def config(kind: type[T], fields: Mapping[str, Any]) -> T:
    """A config dataclass as `dataclasses.asdict` and JSON left it; rotary embeddings are all that is nested in one."""
    rope = lambda x: RopeConfig(**tuples(x)) if isinstance(x, Mapping) else x  # noqa: E731
    return kind(**{name: rope(value) for name, value in tuples(fields).items()})


def check_fields(fields: Mapping[str, Any], *known: str) -> None:
    """ValueError for a config.json with other fields than the format's name, the target's and those known."""
    if unknown := fields.keys() - {"format", "target", *known}:
        raise ValueError(f"config.json has {', '.join(sorted(unknown))}; taken: {', '.join(known)}")


def tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """JSON's lists as the tuples that were written; ValueError for anything but an object."""
    if not isinstance(fields, Mapping):
        raise ValueError(f"settings: got {fields!r}, takes an object")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
