"""A model's functions on a mesh: each device runs them on its own rows, heads and experts (a shard_map of the whole).

Inside, the model is a smaller one: its config has a device's heads, and its leaves sum or gather over the mesh where
what they make is whole (`linear.Summed`, `SplitEmbedding`, `experts.Part`). So its code, kernels and all, is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from pallas_kernels.platform import split_by_compiler
from spec_jax.models import partition, placement
from spec_jax.models.config import LlamaConfig
from spec_jax.models.experts import Experts, Part
from spec_jax.models.linear import Picked, SplitEmbedding, Summed
from spec_jax.models.partition import Split
from spec_jax.models.placement import EXPERT, TENSOR, AnyMesh
from spec_jax.models.qwen_config import QwenConfig

C = TypeVar("C", LlamaConfig, QwenConfig)


def call(target: Any, f: Callable[..., Any], params: Any, *args: Any, batch: int) -> Any:
    """f(target, params, *args) of a target with a mesh: its outputs, split as `partition.state_specs` says.

    f gets a device's target (which has no mesh), its parameters and its part of the arguments: arrays whose names
    `state_specs` knows, others with rows first, and scalars. params may be None.
    """
    mesh, rows = target.mesh, placement.row_axes(target.mesh, batch)
    specs = lambda tree: partition.state_specs(target, tree, batch=batch)  # noqa: E731
    own = local(target)

    def run(params: Any, *args: Any) -> Any:
        with split_by_compiler(False):
            return f(own, parts(target, params, rows), *args)

    takes = (None if params is None else partition.param_specs(target, params), *(specs(x) for x in args))
    shaped = lambda out: jax.shard_map(run, mesh=mesh, in_specs=takes, out_specs=out, check_vma=False)  # noqa: E731
    return shaped(specs(jax.eval_shape(shaped(P()), params, *args)))(params, *args)


def score(
    target: Any, f: Callable[..., Any], params: Any, *args: Any, nodes: tuple[Array | int, int], batch: int
) -> Any:
    """`call` of a function whose last argument is `nodes`, (start, n), of which n is static and start may be."""
    start, n = nodes
    if isinstance(start, int):
        return call(target, lambda own, *args: f(own, *args, nodes), params, *args, batch=batch)
    return call(target, lambda own, *args: f(own, *args[:-1], (args[-1], n)), params, *args, start, batch=batch)


def local(target: Any) -> Any:
    """The target that one device runs: without a mesh, its config with the device's heads."""
    return dataclasses.replace(target, config=local_config(target.config, target.mesh), mesh=None)


def local_config(config: C, mesh: AnyMesh) -> C:
    """The config of the model that one device runs: with the device's heads."""
    split, t, fewer = partition.split_of(config, mesh), mesh.shape[TENSOR], {}
    if split.heads:
        fewer |= {"num_heads": config.num_heads // t, "num_kv_heads": split.held // t}
    for name in ("linear_num_key_heads", "linear_num_value_heads") if split.delta else ():
        if (size := getattr(config, name, None)) is not None:
            fewer[name] = size // t
    return dataclasses.replace(config, **fewer)


def whole(target: Any) -> Any:
    """The target whose states are those of all devices together: without a mesh, its config with the KV heads held."""
    held = partition.split_of(target.config, target.mesh).held
    return dataclasses.replace(target, config=dataclasses.replace(target.config, num_kv_heads=held), mesh=None)


def settled(target: Any, state: Any, batch: int | None = None) -> Any:
    """The state where `partition.state_specs` wants it."""
    specs = partition.state_specs(target, state, batch=batch)
    return lax.with_sharding_constraint(state, placement.shardings(target.mesh, specs))


def parts(target: Any, params: Any, rows: tuple[str, ...]) -> Any:
    """A device's arrays as parameters: leaves whose work ends on other devices say so."""
    split = partition.split_of(target.config, target.mesh)
    share = target.mesh.shape[TENSOR] // target.config.num_kv_heads

    def one(path: Any, x: Any) -> Any:
        if isinstance(x, Experts):
            return _experts(split, x, rows)
        part, side = partition.role(path) or (None, None)
        if part == "kv" and split.heads and not split.kv:
            return Picked(x, target.config.head_dim, share, TENSOR)
        if part is None or not getattr(split, part):
            return x
        if partition.names(path)[-1] == "embedding":
            return SplitEmbedding(x, TENSOR)
        return Summed(x, TENSOR) if side == "rows" else x

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=partition.is_leaf)


def _experts(split: Split, leaves: Experts, rows: tuple[str, ...]) -> Experts:
    number, inner = EXPERT if split.experts else None, TENSOR if split.inner else None
    return dataclasses.replace(leaves, part=Part(number, inner, EXPERT in rows))
