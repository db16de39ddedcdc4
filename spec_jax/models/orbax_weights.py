"""Parameters saved with orbax: written from one mesh, read onto another, each device its own part."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from spec_jax.models.checkpoint import CheckpointError
from spec_jax.models.linear import straight

WEIGHTS = "params"

_BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)


def save_orbax(directory: str | Path, params: Any, source: str | Path) -> None:
    """Write a directory that `load_target` reads: the parameters, on whatever devices, and source's JSON.

    With several processes all of them call this with the same arguments, and the directory is one that they share.

    Args:
        directory: made if it is not there.
        params: arrays of a target, per layer or stacked; their devices' parts are written by those who hold them.
            Transposed kernels are written as ordinary ones.
        source: the Hugging Face directory whose config and tokenizer they go with.

    Raises:
        FileNotFoundError: if source has no config.json.
        ValueError: if the directory holds weights already.
    """
    directory, source = Path(directory).absolute(), Path(source)
    if not (source / "config.json").is_file():
        raise FileNotFoundError(f"source: {source} has no config.json")
    if (directory / WEIGHTS).exists():
        raise ValueError(f"directory: {directory} holds weights already, takes one that has none")
    if jax.process_index() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        for name in _BESIDE:
            if (source / name).is_file() and not (directory / name).exists():
                shutil.copyfile(source / name, directory / name)
    with ocp.StandardCheckpointer() as writer:
        writer.save(directory / WEIGHTS, straight(params))


def saved_here(directory: Path) -> bool:
    """Whether a directory holds weights that `save_orbax` wrote."""
    return (directory / WEIGHTS).is_dir()


def fields(directory: Path) -> dict[str, Any]:
    """The names and shapes in saved weights, as nested dicts and lists; CheckpointError if it is not such weights."""
    try:
        with ocp.StandardCheckpointer() as reader:
            found: Any = reader.metadata((directory / WEIGHTS).absolute())
    except Exception as error:  # orbax raises what its storage raises
        raise CheckpointError(f"{directory / WEIGHTS}: no whole orbax checkpoint: {error}") from error
    if found.item_metadata is None:
        raise CheckpointError(f"{directory / WEIGHTS}: no whole orbax checkpoint")
    return dict(found.item_metadata.tree)


def restore(directory: Path, like: Any) -> Any:
    """The weights in the structure, types and shardings of `like`, a tree of ShapeDtypeStruct.

    Raises CheckpointError naming every array that is missing, left over, or of another shape.
    """
    found = {_name(path): x.shape for path, x in jax.tree.leaves_with_path(fields(directory))}
    wanted = {_name(path): x.shape for path, x in jax.tree.leaves_with_path(like)}
    problems = [f"missing {name}" for name in wanted.keys() - found.keys()]
    problems += [f"left over {name}" for name in found.keys() - wanted.keys()]
    both = wanted.keys() & found.keys()
    problems += [f"{n} {list(found[n])}, not {list(wanted[n])}" for n in both if tuple(found[n]) != wanted[n]]
    if problems:
        raise CheckpointError(f"{directory / WEIGHTS} is of another model: {'; '.join(sorted(problems)[:20])}")
    try:
        with ocp.StandardCheckpointer() as reader:
            return reader.restore((directory / WEIGHTS).absolute(), like)
    except Exception as error:
        raise CheckpointError(f"{directory / WEIGHTS}: damaged: {error}") from error


def _name(path: Sequence[Any]) -> str:
    """A leaf's path, whether its parents are dataclasses, dicts or sequences."""
    part = lambda key: getattr(key, "name", getattr(key, "key", getattr(key, "idx", None)))  # noqa: E731
    return ".".join(str(part(key)) for key in path)
