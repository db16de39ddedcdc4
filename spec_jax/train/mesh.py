"""Training on several devices: rows of a batch split over them, parameters on each. One device needs none of it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "data"


def data_mesh(devices: int | None = None) -> Mesh:
    """A mesh of the first `devices` devices (all if None) in one axis; ValueError for more than there are."""
    there = jax.devices()
    count = len(there) if devices is None else devices
    if not 1 <= count <= len(there):
        raise ValueError(f"devices: got {devices}, takes 1 .. {len(there)}")
    return Mesh(np.array(there[:count]), (AXIS,))


def replicate(tree: Any, mesh: Mesh | None) -> Any:
    """Every array on every device; the same tree without a mesh."""
    return tree if mesh is None else jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def split(tree: Any, mesh: Mesh | None) -> Any:
    """Every array split by its rows; ValueError for a number of rows that the devices do not divide."""
    if mesh is None:
        return tree
    for x in jax.tree.leaves(tree):
        if x.shape[0] % mesh.size:
            raise ValueError(f"batch: got {x.shape[0]} rows, takes a multiple of the mesh's {mesh.size} devices")
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(AXIS)))
