"""Trees against chains of as many nodes on five classes of real prompts: acceptance length and speed-up of each.

The chain is the suffix drafter's best match alone; the tree is a configuration's (GOOSE by default: that chain as a
spine, with recycled successors as branches). Both are cut to the compiled widths by the same controller, and plain
decoding runs in turn with them. With --full every draft is verified whole, so that acceptance lengths compare drafts of
equal size and nothing else; `sources` then has those of the suffix tree and of Token Recycling alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from typing import Any

import choose

from spec_jax import configs
from spec_jax.control.budget import Always
from spec_jax.drafters.suffix import Suffix
from spec_jax.models.load import load_target

from . import output, runs, schema
from .sides import Sides

_TREES = ("goose", "graft", "suffix_decoding", "token_recycling")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    parser.add_argument("--model", default="smollm2", help="as for decode")
    parser.add_argument("--max-len", type=int, default=1024, metavar="N", help="longest text, prompt and answer (1024)")
    parser.add_argument("--tree", choices=_TREES, default="goose", help="the configuration that drafts trees (goose)")
    parser.add_argument("--full", action="store_true", help="verify every draft whole, and the tree's sources as well")
    choose.add_sampling_arguments(parser)
    runs.add_arguments(parser)
    output.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Measure and print."""
    runs.quicken(args)
    model, settings = load_target(args.model), choose.sampling_of(args)
    cases = runs.cases(model, args)
    engines = {"plain": configs.build("plain", model.target, args.max_len)}
    suffix = configs.build("suffix_decoding", model.target, args.max_len)
    engines["chain"] = dataclasses.replace(suffix, drafter=Suffix(candidates=1))
    engines["tree"] = configs.build(args.tree, model.target, args.max_len)
    sources = ("suffix_decoding", "token_recycling") if args.full else ()
    engines |= {name: configs.build(name, model.target, args.max_len) for name in sources}
    for name in engines:
        if name != "plain" and args.full:
            engines[name] = dataclasses.replace(engines[name], controller=Always(), widths=())
        elif name != "plain":
            engines[name] = runs.fewer_widths(engines[name], args)
    sides = Sides({n: choose.decoder(model, e) for n, e in engines.items()}, cases, args, settings)

    classes: dict[str, Any] = {}
    for cls in runs.classes(cases):
        plain = sides.tokens_per_second("plain", cls)
        entry: dict[str, Any] = {
            side: {
                "acceptance_length": sides.acceptance_length(side, cls),
                "speedup": sides.tokens_per_second(side, cls) / plain,
            }
            for side in ("chain", "tree")
        }
        entry["same_text"] = runs.merge([sides.counted(side, cls, model) for side in ("chain", "tree")])
        if sources:
            entry["sources"] = {name: sides.acceptance_length(name, cls) for name in sources}
        classes[cls] = entry
        print(f"{cls}: {entry}", file=sys.stderr)
    best = {cls: max(c["chain"]["speedup"], c["tree"]["speedup"]) for cls, c in classes.items()}
    result = {
        "classes": classes,
        "best_code_edit": best["code-edit"],
        "mean_speedup": statistics.geometric_mean(c["tree"]["speedup"] for c in classes.values()),
    }
    output.finish(result, schema.load("trees"), args, _plot)


def _plot(result: dict[str, Any], figure: Any) -> None:
    names = list(result["classes"])
    for axes, field, title in zip(
        figure.subplots(1, 2),
        ("speedup", "acceptance_length"),
        ("speed-up over plain decoding", "tokens per target pass"),
        strict=True,
    ):
        for offset, side in ((-0.2, "chain"), (0.2, "tree")):
            values = [result["classes"][n][side][field] for n in names]
            bars = axes.barh([i + offset for i in range(len(names))], values, 0.38, label=side)
            axes.bar_label(bars, [f"{v:.2f}" for v in values])
        axes.set_yticks(range(len(names)), names)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_title(title)
        axes.legend()
        axes.invert_yaxis()
