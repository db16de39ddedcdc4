"""Speculative against plain decoding on real prompts, in turn in the same run, without prefill.

Both sides are this engine: plain is the same program with no drafter. A class's speed-up is the ratio of the summed
median times; its acceptance length is tokens per target pass. same_text counts tokens by the replay check.
round_overhead is the part of a round's time that is not the target pass.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import choose

from spec_jax.models.load import load_target
from spec_jax.sampling.settings import Sampling

from . import output, runs, schema
from .overhead import Overhead
from .sides import Sides

DEFAULT = "suffix_decoding"
SAMPLED = Sampling(temperature=0.8, top_p=0.95)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    choose.add_model_arguments(parser)
    choose.add_sampling_arguments(parser)
    runs.add_arguments(parser)
    output.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Measure and print."""
    runs.quicken(args)
    model, settings = load_target(args.model), choose.sampling_of(args)
    engine, drafter_params = choose.build(args, model, choose.config_of(args, DEFAULT))
    engine = runs.fewer_widths(engine, args)
    plain, _ = choose.build(argparse.Namespace(**{**vars(args), "draft_model": None}), model, "plain")
    cases = runs.cases(model, args)
    fast = choose.decoder(model, engine, drafter_params)
    sides = Sides({"plain": choose.decoder(model, plain), "speculative": fast}, cases, args, settings)
    if fast.cost is not None:
        first = fast.cost.seconds[0]
        relative = [f"{n}: {s / first:.2f}" for n, s in zip(fast.cost.nodes, fast.cost.seconds, strict=True)]
        print("relative cost of a round by width:", ", ".join(relative), file=sys.stderr)
    classes = {}
    for cls in runs.classes(cases):
        rate = {side: sides.tokens_per_second(side, cls) for side in ("plain", "speculative")}
        classes[cls] = {
            "speedup": rate["speculative"] / rate["plain"],
            "acceptance_length": sides.acceptance_length("speculative", cls),
            "tokens_per_second": rate,
            "same_text": runs.merge([sides.counted("speculative", cls, model)]),
        }
        print(f"{cls}: {classes[cls]}", file=sys.stderr)
    overhead = Overhead(engine, fast.params)
    result = {
        "classes": classes,
        "mean_speedup": statistics.geometric_mean(c["speedup"] for c in classes.values()),
        "round_overhead": {
            name: overhead.measure(cases[0].ids, sampling, args.quick)
            for name, sampling in (("greedy", Sampling()), ("sampled", SAMPLED))
        },
        "recompiles": sides.recompiles,
    }
    output.finish(result, schema.load("decode"), args, _plot)


def _plot(result: dict[str, Any], figure: Any) -> None:
    names = list(result["classes"])
    left, right = figure.subplots(1, 2)
    for axes, field, title in (
        (left, "speedup", "speed-up over plain decoding"),
        (right, "acceptance_length", "tokens per target pass"),
    ):
        values = [result["classes"][n][field] for n in names]
        bars = axes.barh(names, values)
        axes.bar_label(bars, [f"{v:.2f}" for v in values])
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_title(title)
        axes.invert_yaxis()
