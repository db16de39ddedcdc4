"""Training on several devices: rows of a batch split over them, parameters on each. One device needs none of it."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from spec_jax.models import placement
from spec_jax.models.placement import DATA


def data_mesh(devices: int | None = None) -> Mesh:
    """A mesh of the first `devices` devices (all if None) along "data"; ValueError for more than there are."""
    there = len(jax.devices())
    if devices is not None and not 1 <= devices <= there:
        raise ValueError(f"devices: got {devices}, takes 1 .. {there}")
    return placement.make_mesh({DATA: there if devices is None else devices})


def replicate(tree: Any, mesh: Mesh | None) -> Any:
    """Every array on every device; the same tree without a mesh."""
    return tree if mesh is None else jax.device_put(tree, placement.shardings(mesh, PartitionSpec()))


def split(tree: Any, mesh: Mesh | None) -> Any:
    """Every array split by its rows; ValueError for a number of rows that the devices do not divide."""
    if mesh is None:
        return tree
    for x in jax.tree.leaves(tree):
        if x.shape[0] % mesh.shape[DATA]:
            raise ValueError(f"batch: got {x.shape[0]} rows, takes a multiple of the mesh's {mesh.shape[DATA]} devices")
    return jax.device_put(tree, placement.shardings(mesh, PartitionSpec(DATA)))
