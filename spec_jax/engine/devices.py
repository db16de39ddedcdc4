"""An engine on a mesh: where its arrays lie, and how its devices come to one decision.

The target's mesh is the engine's. Requests are on every device, caches are split. Each row's verdict is found on one
device, on whole logits in a single device's order of additions, and sent to all; so is its draft.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.platform import split_by_compiler
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.state import EngineState
from spec_jax.models import partition, placement
from spec_jax.models.llama import Llama, LlamaParams
from spec_jax.models.placement import AXES
from spec_jax.models.qwen import Qwen, QwenParams
from spec_jax.tree import Draft

F = TypeVar("F", bound=Callable[..., Any])


def mesh_of(engine: Engine) -> Mesh | None:
    """The mesh that the engine's target is split over."""
    return getattr(engine.target, "mesh", None)


def on_devices(f: F) -> F:
    """A function of (engine, ...) that chooses no kernel where a mesh splits the engine's arrays.

    Outside of the models, which call kernels on each device, XLA splits arrays, and it can't split a kernel.
    """

    @functools.wraps(f)
    def run(engine: Engine, *args: Any, **options: Any) -> Any:
        with split_by_compiler(mesh_of(engine) is not None):
            return f(engine, *args, **options)

    return cast(F, run)


def decided(mesh: Mesh, f: Callable[[Any, Any], Any], batch: Any, shared: Any) -> Any:
    """f(batch, shared), batched by rows: each row's result is that of one device, on all of them.

    The rows are split over as many axes as divide their number. Along the others devices do the same, and the first
    one's result is taken.
    """
    split = placement.row_axes(mesh, jax.tree.leaves(batch)[0].shape[0], AXES)
    same = tuple(axis for axis in AXES if axis not in split)

    def send(x: Array) -> Array:
        x = lax.all_gather(x, split, tiled=True) if split else x
        return lax.all_gather(x, same)[0] if same else x

    run = lambda batch, shared: jax.tree.map(send, f(batch, shared))  # noqa: E731
    takes = (placement.trimmed(split or None), P())
    return jax.shard_map(run, mesh=mesh, in_specs=takes, out_specs=P(), check_vma=False)(batch, shared)


def one_draft(engine: Engine, draft: Draft) -> Draft:
    """The draft, every row's tree and confidences those of one device."""
    mesh = mesh_of(engine)
    if mesh is None:
        return draft
    tree, confidence = decided(mesh, lambda batch, _: batch, (draft.tree, draft.confidence), ())
    return dataclasses.replace(draft, tree=tree, confidence=confidence)


def state_specs(engine: Engine, state: EngineState) -> EngineState:
    """A PartitionSpec for every array of an engine's state: requests whole, the models' states split."""
    batch, owner = state.rows.length.shape[0], _owner(engine.drafter)
    whole = lambda tree: jax.tree.map(lambda _: P(), tree)  # noqa: E731
    target = partition.state_specs(engine.target, state.target)
    drafter = whole(state.drafter) if owner is None else partition.cache_specs(owner, state.drafter, batch)
    return type(state)(whole(state.rows), target, drafter, whole(state.controller))


def shardings(engine: Engine, state: EngineState) -> Any:
    """A NamedSharding for every array of the state of an engine on a mesh; shapes will do."""
    return placement.shardings(placement.mesh_of(engine.target), state_specs(engine, state))


def settled(engine: Engine, state: EngineState) -> EngineState:
    """The state with every array where it belongs; the same state without a mesh."""
    return state if mesh_of(engine) is None else lax.with_sharding_constraint(state, shardings(engine, state))


def put(engine: Engine, state: EngineState) -> EngineState:
    """A state from this host's arrays on the engine's devices; the same state without a mesh."""
    return state if mesh_of(engine) is None else placement.put(state, shardings(engine, state))


def place(engine: Engine, params: EngineParams) -> EngineParams:
    """The parameters on the engine's devices; the same ones without a mesh.

    What the drafter shares with the target stays shared. A small model of its own is split as the target is, by its own
    sizes; other drafters' parameters are on every device.
    """
    mesh = mesh_of(engine)
    if mesh is None:
        return params
    target = partition.place(engine.target, params.target)
    known = {id(a): b for a, b in zip(jax.tree.leaves(params.target), jax.tree.leaves(target), strict=True)}
    owner, whole = _owner(engine.drafter), placement.shardings(mesh, P())

    def own(node: Any) -> Any:
        model = isinstance(node, LlamaParams | QwenParams) and owner is not None
        specs = partition.param_specs(owner, node) if model else jax.tree.map(lambda _: P(), node)
        places = placement.shardings(mesh, specs)
        here = lambda x, at: known[id(x)] if id(x) in known else placement.put(x, at)  # noqa: E731
        return jax.tree.map(here, node, places)

    drafter = jax.tree.map(own, params.drafter, is_leaf=lambda x: isinstance(x, LlamaParams | QwenParams))
    rest = jax.tree.map(lambda x: placement.put(x, whole), (params.constraint, params.cost))
    return EngineParams(target, drafter, *rest)


def _owner(piece: Any) -> Any:
    """The first model with a mesh inside a drafter; None where there is none."""
    if isinstance(piece, Llama | Qwen) and piece.mesh is not None:
        return piece
    inside = piece if isinstance(piece, tuple) else ()
    if dataclasses.is_dataclass(piece):
        inside = tuple(getattr(piece, f.name) for f in dataclasses.fields(piece))
    return next((found for x in inside if (found := _owner(x)) is not None), None)


def everywhere(mesh: Mesh, x: Array) -> Array:
    """The whole array on every device."""
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(x)


def of_first(engine: Engine, value: np.ndarray) -> np.ndarray:
    """The value that the process of the mesh's first device has, for all processes of the mesh and no others."""
    mesh = mesh_of(engine)
    if mesh is None or not mesh.is_multi_process:
        return value
    own = [jax.device_put(value[None], device) for device in mesh.local_devices]
    rows = NamedSharding(mesh, P(AXES))
    everyone = jax.make_array_from_single_device_arrays((mesh.size, *value.shape), rows, own)
    return np.asarray(jax.jit(lambda x: x[0], out_shardings=NamedSharding(mesh, P()))(everyone))
