"""Trained drafters, retrieval and both together at equal nodes, on prompts that no drafter was trained on.

Acceptance length is tokens per target pass with every draft verified whole; ci95 is its 95 % interval over prompts
(Student's t, benches/intervals.py). speedup is over plain decoding in turn in the same run, with drafts cut by their
measured cost. Both are given for greedy decoding and at temperature 1, where drafts are coupled with the target's
noise; the figures at the top of an entry are the greedy ones. same_text counts tokens of all these runs by the replay
check. loss is what part of the greedy length is lost at temperature 1. --rules adds, for trees, every other exact rule
at temperature 1 and equal nodes, and what coupled drafts gain over it. Drafters without weights in --drafters-dir are
named and left out. Beside what papers say that one drafter gains over another stands what it gains here.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

from spec_jax import configs
from spec_jax.models.load import load_target

from . import output, runs, schema
from .drafters_measure import SETTINGS, measure
from .drafters_published import LOSS, LOSS_SOURCE, PUBLISHED
from .drafters_systems import COMBINED, JOINED, SYSTEMS, TRAINED, collect

CLASSES = {"smollm2": ("mtbench", "humaneval"), "small_hybrid": ()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    several = functools.partial(parser.add_argument, nargs="+", metavar="NAME")
    several("--target", choices=tuple(CLASSES), help=f"of {', '.join(CLASSES)} (all)")
    several("--rows", choices=(*SYSTEMS, *COMBINED), help=f"of {', '.join((*SYSTEMS, *COMBINED))} (all)")
    several("--classes", choices=runs.CLASSES, help=f"SmolLM2's prompts, of {', '.join(runs.CLASSES)} (two)")
    parser.add_argument("--drafters-dir", type=Path, default=TRAINED, metavar="DIR", help="a folder of TARGET/NAME")
    parser.add_argument("--nodes", type=int, default=8, metavar="N", help="drafted nodes of every draft (8)")
    parser.add_argument("--join", choices=JOINED, help="what retrieval is added to (the first that is there)")
    parser.add_argument("--rules", action="store_true", help="trees under the other exact rules too, at temperature 1")
    parser.add_argument("--seed", type=int, default=0, help="key of the sampled texts (0)")
    runs.add_arguments(parser, prompts=8, tokens=128, repeats=1)
    output.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Measure and print."""
    if args.nodes < 1:
        raise ValueError(f"--nodes: got {args.nodes}, takes 1 or more")
    if not args.drafters_dir.is_dir() and args.drafters_dir != TRAINED:
        raise FileNotFoundError(f"--drafters-dir: got {args.drafters_dir}, which is no folder")
    runs.quicken(args)
    targets = args.target or (["small_hybrid"] if args.quick else list(CLASSES))
    if args.classes and not any(CLASSES[name] for name in targets):
        raise ValueError(
            f"--classes: got {', '.join(args.classes)} for {', '.join(targets)}, takes smollm2 as a target"
        )
    result = {name: _target(name, args) for name in targets}
    for name, found in result.items():
        print(table(name, found))
    output.finish({"targets": result}, schema.load("drafters"), args, _plot)


def _target(name: str, args: argparse.Namespace) -> dict[str, Any]:
    model = load_target(name)
    args = argparse.Namespace(**vars(args), model=name, max_len=model.max_position_embeddings)
    cases = runs.cases(model, args, tuple(args.classes or CLASSES[name]))
    max_len = runs.room(cases, args.tokens)
    rows, left = collect(model, args.drafters_dir / name, args.nodes, max_len, args.rows, args.join)
    if args.quick:
        kept = fewest(rows)
        left |= {row: "--quick" for row in rows if row not in kept}
        rows = {r: dataclasses.replace(rows[r], engine=runs.fewer_widths(rows[r].engine, args)) for r in kept}
    for row, why in left.items():
        print(f"{name}: {row} is left out: {why}", file=sys.stderr)
    if not rows:
        raise ValueError(f"--rows: got {args.rows}, takes one that {name} has a drafter for")
    plain = configs.build("plain", model.target, max_len)
    measured = measure(model, plain, rows, cases, args)
    return measured | {"left_out": left, "prompts": len(cases), "nodes": args.nodes}


def fewest(rows: dict[str, Any]) -> list[str]:
    """One row of each kind: without weights, with weights, and joined."""
    kinds: dict[tuple[bool, bool], str] = {}
    for name, row in rows.items():
        kinds.setdefault((row.joined is not None, row.weights is not None and row.joined is None), name)
    return [name for name in rows if name in kinds.values()]


def table(target: str, found: dict[str, Any]) -> str:
    """A target's drafters in rows and settings in columns, and below it what papers say beside what was found."""
    sizes = f"{found['prompts']} prompts, {found['nodes']} drafted nodes"
    lines = [f"{target}: {sizes}; acceptance length [95 %], speed-up"]
    for name, row in found["drafters"].items():
        cells = [_cell(row[setting]) for setting in SETTINGS]
        apart = sum(row[setting]["same_text"]["different"] for setting in SETTINGS)
        size = f"{row['nodes']} nodes, depth {row['depth']}"
        lines.append(f"{name:12} {size:18} " + "  ".join(f"{s} {c}" for s, c in zip(SETTINGS, cells, strict=True)))
        lines[-1] += f"  text {'equal' if not apart else f'different in {apart}'}"
        lines[-1] += f", temperature 1 loses {_part(row['loss'])}"
        if len(row["greedy"]["classes"]) > 1:
            lengths, speeds = row["greedy"]["classes"], row["greedy"]["class_speedups"]
            parts = (f"{cls} {x:.2f} {speeds[cls]:.2f}x" for cls, x in lengths.items())
            lines.append(f"{'':12} greedy by class: {', '.join(parts)}")
        for rule, figures in row.get("rules", {}).items():
            size = f"{figures['nodes']} nodes, depth {figures['depth']}"
            cell = f"{'':12} {size:18} {rule:20} sampled {_length(figures)}, loses {_part(figures['loss'])}"
            lines.append(f"{cell}; coupled {_part(figures['coupled_over'], '+')}")
    lines.append(f"published block drafters lose {100 * LOSS:.0f} % at temperature 1 ({LOSS_SOURCE})")
    lines += [f"{name:12} left out: {why}" for name, why in found["left_out"].items()]
    for delta in PUBLISHED:
        low, high = (f"{100 * g:+.1f}" for g in delta.gain)
        said = f"{low} %" if low == high else f"{low} to {high} %"
        ours = found["deltas"].get(delta.name)
        here = "not measured" if ours is None else ", ".join(_gain(s, ours[s]) for s in SETTINGS)
        lines.append(f"{delta.name}: published {said} in {delta.measure} ({delta.source}); here {here}")
    return "\n".join(lines)


def _cell(figures: dict[str, Any]) -> str:
    return f"{_length(figures)} {figures['speedup']:5.2f}x"


def _length(figures: dict[str, Any]) -> str:
    ci = figures["ci95"]
    return f"{figures['acceptance_length']:5.2f} " + ("[one prompt]" if ci is None else f"[{ci[0]:.2f}, {ci[1]:.2f}]")


def _gain(setting: str, gain: dict[str, Any]) -> str:
    length = _part({"part": gain["acceptance_length"], "ci95": gain["ci95"]}, "+")
    return f"{setting} {length} in length, {100 * gain['speedup']:+.1f} % in speed"


def _part(change: dict[str, Any], sign: str = "") -> str:
    ci = change["ci95"]
    sure = "" if ci is None else f" [{100 * ci[0]:{sign}.1f}, {100 * ci[1]:{sign}.1f}]"
    return f"{100 * change['part']:{sign}.1f} %{sure}"


def _plot(result: dict[str, Any], figure: Any) -> None:
    targets = result["targets"]
    panels = figure.subplots(len(targets), 2, squeeze=False)
    fields = (("acceptance_length", "tokens per target pass"), ("speedup", "speed-up over plain decoding"))
    for panel, (name, found) in zip(panels, targets.items(), strict=True):
        rows = list(found["drafters"])
        for axes, (field, title) in zip(panel, fields, strict=True):
            for offset, setting in zip((-0.2, 0.2), SETTINGS, strict=True):
                figures = [found["drafters"][row][setting] for row in rows]
                values, at = [f[field] for f in figures], [i + offset for i in range(len(rows))]
                bars = axes.barh(at, values, 0.38, xerr=_reach(figures, field), label=setting)
                axes.bar_label(bars, [f"{v:.2f}" for v in values])
            axes.set_yticks(range(len(rows)), rows)
            axes.axvline(1.0, color="black", linewidth=0.8)
            axes.set_title(f"{name}: {title}")
            axes.invert_yaxis()
    panels[0][0].legend()


def _reach(figures: list[dict[str, Any]], field: str) -> list[list[float]] | None:
    """How far the intervals reach to both sides; None for a figure without them."""
    if field != "acceptance_length":
        return None
    pairs = [(f[field], f["ci95"] or (f[field],) * 2) for f in figures]
    return [[abs(ends[side] - value) for value, ends in pairs] for side in (0, 1)]
