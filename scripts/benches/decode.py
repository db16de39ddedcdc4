"""Speculative against plain decoding on five classes of real prompts, in turn in the same run, without prefill.

Both sides are this engine: plain is the same program with no drafter. A class's speed-up is the ratio of the summed
median times; its acceptance length is tokens per target pass. same_text counts tokens by the replay check.
round_overhead is the part of a round's time that is not the target pass.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from typing import Any

import choose

from spec_jax.audit.replay import replay
from spec_jax.models.load import load_target
from spec_jax.sampling.settings import Sampling

from . import output, runs, schema
from .overhead import Overhead

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
    name = choose.config_of(args, "suffix_decoding")
    engine, drafter_params = choose.build(args, model, name)
    engine = runs.fewer_widths(engine, args)
    plain_engine, _ = choose.build(argparse.Namespace(**{**vars(args), "draft_model": None}), model, "plain")
    cases = runs.cases(model, args)
    fast = choose.decoder(model, engine, drafter_params)
    plain = choose.decoder(model, plain_engine)
    for decoder in (fast, plain):
        runs.warm(decoder, cases[0], settings)
    if fast.cost is not None:
        relative = [
            f"{n}: {s / fast.cost.seconds[0]:.2f}" for n, s in zip(fast.cost.nodes, fast.cost.seconds, strict=True)
        ]
        print("relative cost of a round by width:", ", ".join(relative), file=sys.stderr)
    before = fast.programs + plain.programs

    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    results: dict[tuple[str, str], Any] = {}
    for repeat in range(args.repeats):
        for case in cases:
            order = (("plain", plain), ("fast", fast))
            for side, decoder in order if repeat % 2 == 0 else reversed(order):
                result, without_prefill, _ = runs.timed(decoder, case.ids, args.tokens, settings, args.seed)
                seconds[side, case.name].append(without_prefill)
                results[side, case.name] = result
        print(f"run {repeat + 1} of {args.repeats} done", file=sys.stderr)
    recompiles = fast.programs + plain.programs - before

    classes = {
        cls: _class(args, model, settings, cls, cases, seconds, results) for cls in runs.CLASSES
    }
    measured = Overhead(engine, fast.params)
    overhead = {
        "greedy": measured.measure(cases[0].ids, Sampling(), args.quick),
        "sampled": measured.measure(cases[0].ids, SAMPLED, args.quick),
    }
    result = {
        "classes": classes,
        "mean_speedup": statistics.geometric_mean(c["speedup"] for c in classes.values()),
        "round_overhead": overhead,
        "recompiles": recompiles,
    }
    output.finish(result, schema.load("decode"), args, _plot)


def _class(
    args: Any, model: Any, settings: Sampling, cls: str, cases: list[runs.Case], seconds: Any, results: Any
) -> dict[str, Any]:
    room, cases = runs.room(cases, args.tokens), [c for c in cases if c.cls == cls]
    total = {side: sum(statistics.median(seconds[side, c.name]) for c in cases) for side in ("plain", "fast")}
    tokens = {side: sum(len(results[side, c.name].tokens) for c in cases) for side in ("plain", "fast")}
    passes = sum(results["fast", c.name].counters["rounds"] for c in cases)
    rate = {side: tokens[side] / total[side] for side in total}
    checks = [
        replay(
            model.target,
            model.params,
            c.ids,
            results["fast", c.name].tokens,
            key=args.seed,
            sampling=settings,
            eos=model.eos_token_ids,
            max_len=room,
        )
        for c in cases
    ]
    out = {
        "speedup": rate["fast"] / rate["plain"],
        "acceptance_length": tokens["fast"] / passes,
        "tokens_per_second": {"plain": rate["plain"], "speculative": rate["fast"]},
        "same_text": runs.merge(checks),
    }
    print(f"{cls}: {out}", file=sys.stderr)
    return out


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
