"""What a kernel's compiler says of it, with no chip at hand: whether it builds, its bundles, and the bytes it moves.

Cases of tree_attention are 8 rows of a Llama-3-8B layer (32 heads over 8 key/value heads of 128, bfloat16). `bundles`
counts libtpu's instruction bundles, null for a GPU; `bytes_over_minimum` compares the bytes that the kernel moves,
counted from its block specs and grid (a GPU's: what its programs load, hits of the L2 cache among them), with reading
every live key and value once.

Cases of gated_delta are 8 rows of a Qwen3.5-35B layer, with and without the commit of what was accepted last.
`bundles_per_head` is libtpu's count over a program's value heads; errors, over the largest entry, are those against
float64 in interpret mode, with the passes that the chip takes.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import aot
from pallas_kernels.tree_attention import gpu, tpu

from . import delta_kernel, output, schema

_BATCH, _HEADS, _KV, _DIM = 8, 32, 8, 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --op and --chip."""
    parser.add_argument("--op", choices=_OPS, required=True)
    parser.add_argument("--chip", choices=aot.CHIPS, required=True)
    output.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Compile and count, case by case."""
    if lacks := aot.missing(args.chip):
        raise ModuleNotFoundError(lacks)
    with tempfile.TemporaryDirectory() as folder:
        aot.dump_schedules(Path(folder))
        aot.device(args.chip)  # what goes wrong here is no refusal of the kernel
        cases = list(_OPS[args.op](args.chip, args.quick, Path(folder)))
    if args.op == "tree_attention":
        output.finish({"cases": cases}, schema.load("kernels"), args, _plot)
    else:
        libtpu = importlib.metadata.version("libtpu") if args.chip in aot.TPU else None
        result = {"cases": cases, "libtpu": libtpu}
        output.finish(result, schema.load("delta_kernel"), args, delta_kernel.plot)


def _tree_attention(chip: str, quick: bool, folder: Path) -> Iterator[dict[str, Any]]:
    kernel: Any = tpu if chip in aot.TPU else gpu
    for n in (16,) if quick else (8, 16, 32, 64, 128):
        for context in (1024,) if quick else (1024, 8192):
            array = lambda *shape: jax.ShapeDtypeStruct((_BATCH, *shape), jnp.bfloat16)  # noqa: E731
            q, cache, tree = array(n, _HEADS, _DIM), array(_KV, context, _DIM), array(_KV, n, _DIM)
            length = jax.ShapeDtypeStruct((_BATCH,), jnp.int32)
            mask = jax.ShapeDtypeStruct((_BATCH, n, n), jnp.bool_)
            moved = kernel.bytes_moved(q, cache, tree, np.full(_BATCH, context))
            case = {
                "n": n,
                "context": context,
                **_compile(
                    lambda *x: kernel.tree_attention(*x, _DIM**-0.5),
                    (q, cache, cache, length, tree, tree, mask),
                    chip,
                    folder,
                    "tree_attention",
                ),
                "bytes_over_minimum": moved / (2 * _BATCH * _KV * (context + n) * _DIM * 2),
            }
            print(case, file=sys.stderr)
            yield case


def _gated_delta(chip: str, quick: bool, folder: Path) -> Iterator[dict[str, Any]]:
    module = f"pallas_kernels.gated_delta.{'tpu' if chip in aot.TPU else 'gpu'}"
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(f"gated_delta has no kernel for {chip}")
    compiled = functools.partial(_compile, chip=chip, folder=folder, name="gated_delta")
    yield from delta_kernel.cases(importlib.import_module(module), quick, compiled)


def _compile(function: Any, args: tuple, chip: str, folder: Path, name: str) -> dict[str, Any]:
    for old in folder.iterdir():
        old.unlink()
    try:
        aot.compile(function, args, chip)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as refusal:
        print(f"not compiled: {refusal}", file=sys.stderr)
        return {"compiled": False, "bundles": None}
    return {"compiled": True, "bundles": aot.bundles(name, folder) if chip in aot.TPU else None}


def _plot(result: dict[str, Any], figure: Any) -> None:
    """Bundles, and bytes over the least possible, over the number of nodes."""
    left, right = figure.subplots(1, 2)
    for context in sorted({case["context"] for case in result["cases"]}):
        some = [case for case in result["cases"] if case["context"] == context]
        counted = [(case["n"], case["bundles"]) for case in some if case["bundles"] is not None]
        if counted:
            left.plot(*zip(*counted, strict=True), "o-", label=f"context {context}")
        right.plot([x["n"] for x in some], [x["bytes_over_minimum"] for x in some], "o-", label=f"context {context}")
    for axes, title in ((left, "bundles"), (right, "bytes over the minimum")):
        axes.set(xscale="log", xlabel="nodes", title=title)
        if axes.lines:
            axes.legend()


_OPS = {"tree_attention": _tree_attention, "gated_delta": _gated_delta}
