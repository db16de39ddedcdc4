"""Pause and go on: an engine's state in one safetensors file."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from spec_jax.engine import devices
from spec_jax.engine.engine import Engine
from spec_jax.engine.state import EngineState


def save(path: str | Path, engine: Engine, state: EngineState, notes: Any = None) -> None:
    """Write a state, with nothing pending in it, and JSON-able notes. The file appears whole or not at all.

    Where a mesh spans several processes all of them take part, and that of its first device writes.
    """
    mesh = devices.mesh_of(engine)
    materialize = engine.target.materialize if mesh is None else jax.jit(engine.target.materialize)
    state = dataclasses.replace(state, target=materialize(state.target))
    host = lambda leaf: np.asarray(leaf if mesh is None else devices.everywhere(mesh, leaf))  # noqa: E731
    arrays = {name: host(leaf) for name, leaf in _named(state).items()}
    if mesh is not None and jax.process_index() != mesh.devices.flat[0].process_index:
        return
    part = Path(f"{path}.part")
    save_file(arrays, part, metadata={"format": "spec_jax.engine/1", "notes": json.dumps(notes)})
    os.replace(part, path)


def load(path: str | Path, like: EngineState) -> tuple[EngineState, Any]:
    """Read a state that has the shape of `like` (from `rows.empty` of the same engine and batch), and the notes.

    Raises:
        ValueError: if the file is no saved state, is damaged, or belongs to an engine of other sizes, naming what
        differs.
    """
    want = _named(like)
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != "spec_jax.engine/1":
                raise ValueError(f"{path}: got a file of format {metadata.get('format')}, takes a saved engine state")
            names = set(file.keys())
            if names != set(want):
                odd = sorted(names ^ set(want))[:4]
                raise ValueError(f"{path}: was saved by another engine; arrays that only one has: {odd}")
            arrays = {name: file.get_tensor(name) for name in want}
            notes = json.loads(metadata["notes"])
    except SafetensorError as error:
        raise ValueError(f"{path}: is damaged or no safetensors file ({error})") from error
    for name, leaf in want.items():
        got = arrays[name]
        if got.shape != leaf.shape or got.dtype != leaf.dtype:
            raise ValueError(
                f"{path}: {name} is {got.dtype}{list(got.shape)}, the engine takes {leaf.dtype}{list(leaf.shape)}"
            )
    structure = jax.tree.structure(like)
    return structure.unflatten([jnp.asarray(arrays[name]) for name in want]), notes


def _named(state: EngineState) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
