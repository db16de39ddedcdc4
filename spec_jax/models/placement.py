"""A mesh of devices with the axes that this library splits over, and arrays put on it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

T = TypeVar("T")

AnyMesh = Mesh | AbstractMesh

DATA, EXPERT, TENSOR = AXES = ("data", "expert", "tensor")


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the axes "data", "expert" and "tensor", each of the size given, 1 where none is.

    It takes the first devices, all of this job's unless `devices` names them. On TPU they are ordered by the torus, so
    that devices along "tensor", which talk most, are neighbours; processes follow each other along the first axes.

    Raises:
        ValueError: for an unknown axis, a size that is no positive integer, or more devices than there are.
    """
    there = list(jax.devices() if devices is None else devices)
    for name, size in sizes.items():
        if name not in AXES:
            raise ValueError(f"sizes: got an axis {name!r}, takes {', '.join(AXES)}")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}: got {size!r}, takes an integer from 1")
    shape = tuple(sizes.get(name, 1) for name in AXES)
    if (count := math.prod(shape)) > len(there):
        got = ", ".join(f"{name} {size}" for name, size in zip(AXES, shape, strict=True))
        raise ValueError(f"sizes: got {got}: {count} devices, takes a product of at most the {len(there)} there are")
    whole = count == len(there) and there[0].platform == "tpu"
    if whole:
        grid = mesh_utils.create_device_mesh(shape, there, allow_split_physical_axes=True)
    else:
        grid = np.array(there[:count]).reshape(shape)
    return Mesh(grid, AXES)


def mesh_of(target: Any, mesh: AnyMesh | None = None) -> Any:
    """The mesh given, or the target's; ValueError where there is none."""
    mesh = getattr(target, "mesh", None) if mesh is None else mesh
    if mesh is None:
        raise ValueError("mesh: got none, and the target has none, takes one (`make_mesh`)")
    return mesh


def with_mesh(piece: T, mesh: Mesh | None) -> T:
    """The same engine, drafter or model, with the mesh given to every model inside it."""
    if isinstance(piece, tuple) and type(piece) is tuple:
        inside = tuple(with_mesh(x, mesh) for x in piece)
        return piece if all(a is b for a, b in zip(inside, piece, strict=True)) else cast(T, inside)
    if not dataclasses.is_dataclass(piece) or isinstance(piece, type):
        return piece
    fields = {f.name: getattr(piece, f.name) for f in dataclasses.fields(piece) if f.init}
    changed = {name: new for name, x in fields.items() if (new := with_mesh(x, mesh)) is not x}
    if "mesh" in fields:
        changed["mesh"] = mesh
    return dataclasses.replace(piece, **changed) if changed else piece


def row_axes(mesh: AnyMesh, batch: int, axes: Sequence[str] = (DATA, EXPERT)) -> tuple[str, ...]:
    """The axes that split a batch's rows: the most of `axes`, from the first one on, that divide their number."""
    first = [tuple(axes[:n]) for n in range(len(axes), -1, -1)]
    return next(some for some in first if batch % math.prod(mesh.shape[a] for a in some) == 0)


def shardings(mesh: Mesh, specs: Any) -> Any:
    """The specs as NamedShardings, without axes of one device, so that equal placements are equal."""

    def one(spec: P) -> NamedSharding:
        axes = [(a,) if isinstance(a, str) else a or () for a in spec]
        kept = [tuple(name for name in names if mesh.shape[name] > 1) for names in axes]
        return NamedSharding(mesh, trimmed(*(k[0] if len(k) == 1 else k or None for k in kept)))

    return jax.tree.map(one, specs, is_leaf=lambda x: isinstance(x, P))


def put(tree: Any, places: Any) -> Any:
    """Arrays on the devices that `places` names. In a job of many processes each gives its own copy of the values."""

    def one(x: Any, place: NamedSharding) -> jax.Array:
        if isinstance(x, jax.Array) and x.sharding == place:
            return x
        if place.is_fully_addressable or isinstance(x, jax.Array) and not x.is_fully_addressable:
            return jax.device_put(x, place)
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, place, lambda index: host[index])

    return jax.tree.map(one, tree, places)


def trimmed(*axes: Any) -> P:
    """The spec without the whole axes at its end, so that equal placements are equal specs."""
    while axes and axes[-1] is None:
        axes = axes[:-1]
    return P(*axes)
