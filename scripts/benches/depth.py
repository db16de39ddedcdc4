"""Compile time and pass time against depth, of layers one after another and of layers scanned in periods.

A hybrid of three gated delta layers in four, dense, of hidden size 256 scores a chain of eight nodes. Nothing comes
from the compilation cache; compile seconds are this process' own, in which other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

from spec_jax.models.qwen import Qwen, QwenParams, stack_layers
from spec_jax.models.qwen_config import ATTENTION, DELTA, QwenConfig
from spec_jax.models.qwen_text import init_params
from spec_jax.tree import Tree

from . import output, schema

NODES, SLOTS = 8, 256
_PERIOD = (DELTA, DELTA, DELTA, ATTENTION)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --depths, --repeats and the options that every subcommand has."""
    parser.add_argument("--depths", type=_depth, nargs="+", default=[4, 8, 16, 32], metavar="LAYERS")
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="timed passes of each (%(default)s)")
    output.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Measure, print a table, and end in its JSON."""
    if args.repeats < 1:
        raise ValueError(f"--repeats: got {args.repeats}, takes 1 or more")
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    depths, repeats = ([4, 8], 3) if args.quick else (args.depths, args.repeats)
    print("layers  form     lower s  compile s  pass ms")
    rows = []
    for depth in depths:
        target, params = _model(depth)
        for form, own in (("tuple", params), ("stacked", stack_layers(target.config, params))):
            rows.append({"layers": depth, "form": form, **measure(target, own, repeats)})
            row = rows[-1]
            print(
                f"{depth:6}  {form:7}  {row['lower_s']:7.2f}  {row['compile_s']:9.2f}  {row['pass_ms']:7.2f}",
                flush=True,
            )
    result = {"backend": jax.default_backend(), "nodes": NODES, "rows": rows}
    output.finish(result, schema.load("depth"), args, _plot)


def measure(target: Qwen, params: QwenParams, repeats: int) -> dict[str, float]:
    """Seconds of the process to lower and to compile one pass, and the best of its times in milliseconds."""
    state = target.init_state(params, 1, SLOTS)
    parent = jnp.arange(-1, NODES - 1)[None]
    tree = Tree(jnp.ones((1, NODES), jnp.int32), parent, jnp.ones((1, NODES), bool))
    start = time.process_time()
    lowered = jax.jit(target.score).lower(params, state, tree)
    between = time.process_time()
    compiled = lowered.compile()
    end = time.process_time()
    jax.block_until_ready(compiled(params, state, tree))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(params, state, tree))
        times.append(time.perf_counter() - begin)
    return {"lower_s": between - start, "compile_s": end - between, "pass_ms": 1e3 * min(times)}


def _model(depth: int) -> tuple[Qwen, QwenParams]:
    config = QwenConfig(
        vocab_size=512,
        hidden_size=256,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        layer_types=_PERIOD * (depth // len(_PERIOD)),
        sparse=(False,) * depth,
        intermediate_size=1024,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        partial_rotary_factor=0.25,
        output_gate=True,
        offset_norms=True,
        tie_word_embeddings=True,
    )
    return Qwen(config), init_params(config, jax.random.key(0))


def _depth(text: str) -> int:
    depth, period = int(text), len(_PERIOD)
    if depth < period or depth % period:
        raise argparse.ArgumentTypeError(f"got {text}, takes a multiple of {period}")
    return depth


def _plot(result: dict[str, Any], figure: Any) -> None:
    for axes, name, label in zip(
        figure.subplots(1, 2), ("compile_s", "pass_ms"), ("compile seconds", "pass, ms"), strict=True
    ):
        for form in ("tuple", "stacked"):
            rows = [row for row in result["rows"] if row["form"] == form]
            axes.plot([row["layers"] for row in rows], [row[name] for row in rows], marker="o", label=form)
        axes.set_xlabel("layers")
        axes.set_ylabel(label)
        axes.legend()
