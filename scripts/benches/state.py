"""What verifying a draft tree costs a recurrent target's state: staged factors against a snapshot per node.

Bytes are counted from the arrays that a gated delta layer of the published sizes stages and keeps (bfloat16 model,
float32 state). Times are rooflines of one sequence through all its gated delta layers, the greater of bytes over
bandwidth and of floating-point work over peak: factors read and write the state once, with the commit of the step
before fused in, in three bfloat16 passes; snapshots read it once and write a state per node.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from spec_jax.models.delta_mixer import DeltaState, StagedDelta
from spec_jax.models.qwen import Qwen
from spec_jax.models.qwen_config import DELTA, QwenConfig
from spec_jax.models.qwen_text import init_params
from spec_jax.tree import Tree

from . import output, schema

TREES = ((1, 1), (2, 2), (4, 4), (8, 4), (16, 8), (32, 8), (64, 16), (128, 16))
_PASSES = 3
_KIB = 1024


@dataclasses.dataclass(frozen=True)
class Model:
    """A published model's gated delta layers (of 128 x 128 heads): how many, and their key and value heads."""

    layers: int
    key_heads: int
    value_heads: int
    head_dim: int = 128


@dataclasses.dataclass(frozen=True)
class _Chip:
    """Peak bfloat16 operations a second and bytes a second, from the makers' data sheets."""

    operations: float
    bandwidth: float


MODELS = {
    "Qwen3-Next-80B": Model(36, 16, 32),
    "Qwen3.5-35B": Model(30, 16, 32),
    "Qwen3.5-397B": Model(45, 16, 64),
}
_CHIPS = {"v5e": _Chip(197e12, 819e9), "v6e": _Chip(918e12, 1640e9), "h200": _Chip(990e12, 4.8e12)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that every subcommand has."""
    output.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Count and print."""
    trees = TREES[:5] if args.quick else TREES
    result = {"models": {name: count(model, trees) for name, model in MODELS.items()}}
    output.finish(result, schema.load("state"), args, _plot)


def count(model: Model, trees: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    """Bytes and times of a model's gated delta layers for trees given as (nodes, depth)."""
    one = _staged(model, 1)
    before, row = one.state.conv.shape[-2:]
    state, conv_row = _bytes(one.state.recurrent), row * one.state.conv.dtype.itemsize
    factor = _bytes(_staged(model, 2).staged.factors) - _bytes(one.staged.factors)
    sequences = []
    for n, depth in trees:
        staged = _bytes(_staged(model, n).staged.factors)
        io = n * (2 * model.value_heads + 2 * model.key_heads) * model.head_dim * 2
        moved = {"factors": 2 * state + 2 * staged + io, "snapshots": (n + 1) * state + io}
        work = {"factors": _PASSES * _operations(model, n, depth), "snapshots": _sequential(model, n)}
        sequences.append(
            {
                "n": n,
                "depth": depth,
                "factors_mib": model.layers * staged / _KIB**2,
                "snapshots_mib": model.layers * n * state / _KIB**2,
                "microseconds": {
                    chip: {
                        form: 1e6 * model.layers * max(moved[form] / c.bandwidth, work[form] / c.operations)
                        for form in moved
                    }
                    for chip, c in _CHIPS.items()
                },
            }
        )
    return {
        "factor_kib_per_node": factor / _KIB,
        "snapshot_kib_per_node": state / _KIB,
        "conv_kib_per_node": conv_row / _KIB,
        "conv_snapshot_kib_per_node": before * conv_row / _KIB,
        "layers": model.layers,
        "sequences": sequences,
    }


@dataclasses.dataclass(frozen=True)
class _Shapes:
    """Shapes of one gated delta layer's state and of what it stages."""

    state: DeltaState
    staged: StagedDelta


def _staged(model: Model, n: int) -> _Shapes:
    target, params = _layer(model)
    tree = Tree(jnp.zeros((1, n), jnp.int32), jnp.arange(n)[None] - 1, jnp.ones((1, n), bool))

    def shapes() -> tuple[DeltaState, StagedDelta]:
        state = target.init_state(params, 1, n)
        _, staged, _ = target.score(params, state, tree)
        return state.layers[0], staged.layers[0]

    return _Shapes(*jax.eval_shape(shapes))


@functools.cache
def _layer(model: Model) -> tuple[Qwen, Any]:
    """One gated delta layer in bfloat16; what it keeps does not depend on the hidden size."""
    config = QwenConfig(
        vocab_size=8,
        hidden_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        layer_types=(DELTA,),
        sparse=(False,),
        intermediate_size=8,
        linear_num_key_heads=model.key_heads,
        linear_num_value_heads=model.value_heads,
        linear_key_head_dim=model.head_dim,
        linear_value_head_dim=model.head_dim,
        linear_conv_kernel_dim=4,
    )
    return Qwen(config), init_params(config, jax.random.key(0), jnp.bfloat16)


def _operations(model: Model, n: int, depth: int) -> float:
    """Products of the factor form: Gram matrices, the state's products, and the solve by depth bisection."""
    d, solve = model.head_dim, max(math.ceil(math.log2(depth)) - 1, 0)
    per_head = 4 * n * d * d + 4 * n * n * d + (4 * solve + 2) * n**3
    return model.key_heads * 4 * n * n * d + model.value_heads * per_head


def _sequential(model: Model, n: int) -> float:
    return model.value_heads * 6 * n * model.head_dim**2


def _bytes(arrays: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def _plot(result: dict[str, Any], figure: Any) -> None:
    for axes, (name, model) in zip(figure.subplots(1, len(result["models"])), result["models"].items(), strict=True):
        nodes = [s["n"] for s in model["sequences"]]
        for chip, style in zip(_CHIPS, ("-", "--", ":"), strict=True):
            for form, color in (("factors", "tab:blue"), ("snapshots", "tab:red")):
                times = [s["microseconds"][chip][form] for s in model["sequences"]]
                axes.loglog(nodes, times, style, color=color, label=f"{form}, {chip}")
        axes.set_title(name)
        axes.set_xlabel("nodes")
        axes.set_ylabel("microseconds a sequence")
        axes.legend()
