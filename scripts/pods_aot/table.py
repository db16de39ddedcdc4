"""The table of compiled rounds: a file that is written after every case, so that a run goes on where one ended."""

from __future__ import annotations

import dataclasses
import gzip
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import aot

from . import chips, cost, program
from .shapes import Case

PROJECT = Path(__file__).parents[2] / "spec_jax" / "control" / "pods.json"
_GIB = 2**30
_LEVELS = {3: 1}  # a round's only switch of three: greedy, sampled and adjusted verification; rows here sample


def fill(
    path: Path, cases: Sequence[Case], nodes: Sequence[int], measure: Callable[[Case, int], dict[str, Any]]
) -> dict[str, Any]:
    """Compile what the table in `path` lacks, and write it after each round; returns the cases asked for, by key.

    measure is `measured`, or what stands in for it. A round is kept if its case's settings and libtpu's version are
    those of today; one that libtpu does not compile is named and left out. Raises ValueError for a file that is no such
    table.
    """
    table = read(path)
    for case in cases:
        about = {**dataclasses.asdict(case), "implementation": "pallas_tpu", "libtpu": libtpu()}
        entry = table.get(case.key)
        if entry is None or {k: v for k, v in entry.items() if k != "rounds"} != about:
            entry = table[case.key] = about | {"rounds": {}}
        for n in nodes:
            if str(n) not in entry["rounds"]:
                try:
                    entry["rounds"][str(n)] = measure(case, n)
                except jax.errors.JaxRuntimeError as error:
                    why = str(error).splitlines()[0]
                    print(f"{case.key}, N={n}: left out, libtpu does not compile it: {why}", file=sys.stderr)
                    continue
                entry["rounds"] = dict(sorted(entry["rounds"].items(), key=lambda x: int(x[0])))
                write(path, table)
            print(line(case, n, entry["rounds"][str(n)]), file=sys.stderr, flush=True)
    return {case.key: table[case.key] for case in cases}


def read(path: Path) -> dict[str, Any]:
    """The table's cases; none if there is no file."""
    if not path.exists():
        return {}
    try:
        shapes = json.loads(path.read_text(encoding="utf-8"))["shapes"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"--table: {path} is no table of compiled rounds ({error!r})") from error
    return dict(shapes)


def write(path: Path, shapes: dict[str, Any]) -> None:
    """The table, whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps({"shapes": shapes}, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def measured(case: Case, nodes: int, texts: Path | None = None) -> dict[str, Any]:
    """What one compiled round says of itself, per chip; its text is kept in the folder `texts`."""
    compiled = program.compiled(case, nodes)
    text = compiled.as_text()
    if texts is not None:
        name = f"{case.key} {nodes}".replace(" ", "_").replace(":", "-")
        (texts / f"{name}.hlo.gz").write_bytes(gzip.compress(text.encode()))
    memory, claimed = compiled.memory_analysis(), compiled.cost_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    chips_there = case.data * case.expert * case.tensor
    found = cost.cost(text, chips.chip(case.topology), chips_there, _LEVELS)
    return {
        "hbm_gib": (held + memory.temp_size_in_bytes) / _GIB,
        "seconds": found.seconds,
        "optimal_seconds": claimed.get("optimal_seconds"),
        "operations": found.operations,
        "hbm_bytes": found.main_bytes,
        "collective_bytes": found.collective_bytes,
        "collectives": found.collectives,
        "loops_counted_once": sorted(set(found.unknown)),
    }


def line(case: Case, nodes: int, x: dict[str, Any]) -> str:
    """A round in one line."""
    moved = ", ".join(f"{kind} {size / 2**20:.1f}" for kind, size in x["collective_bytes"].items()) or "none"
    return (
        f"{case.key}, {case.batch} rows, N={nodes}: HBM {x['hbm_gib']:.2f} GiB a chip, {1e3 * x['seconds']:.3f} ms; "
        f"collectives, MiB a chip: {moved}"
    )


def summary(shapes: dict[str, Any]) -> dict[str, Any]:
    """The result that is printed: memory at the widest round, and seconds by nodes."""
    return {
        "shapes": {
            key: {
                "topology": x["topology"],
                "hbm_gib": max(r["hbm_gib"] for r in x["rounds"].values()),
                "hbm_gib_by_nodes": {n: r["hbm_gib"] for n, r in x["rounds"].items()},
                "chip_gib": chips.chip(x["topology"]).memory_gib,
                "seconds": {n: r["seconds"] for n, r in x["rounds"].items()},
                "seconds_from": "roofline over the compiled program",
            }
            for key, x in shapes.items()
        }
    }


def libtpu() -> str:
    """The version of the compiler; ModuleNotFoundError, saying what to install, where it is not there."""
    if lacks := aot.missing("v5e"):
        raise ModuleNotFoundError(lacks)
    return importlib.metadata.version("libtpu")


def markdown(shapes: dict[str, Any]) -> str:
    """The table of docs/pods_cost.md: memory at N=16, milliseconds by N, and c(16)."""
    nodes = sorted({int(n) for x in shapes.values() for n in x["rounds"]})
    rows = [["case", "rows", "mesh (data, expert, tensor)", "GiB at 16", *(f"ms at {n}" for n in nodes), "c(16)/c(1)"]]
    rows.append(["---"] * len(rows[0]))
    for key, x in shapes.items():
        rounds, mesh = x["rounds"], f"{x['data']}, {x['expert']}, {x['tensor']}"
        times = [f"{1e3 * rounds[str(n)]['seconds']:.2f}" if str(n) in rounds else "" for n in nodes]
        both = {"1", "16"} <= rounds.keys()
        ratio = f"{rounds['16']['seconds'] / rounds['1']['seconds']:.2f}" if both else ""
        memory = f"{rounds['16']['hbm_gib']:.2f} of {chips.chip(x['topology']).memory_gib}" if "16" in rounds else ""
        rows.append([key, str(x["batch"]), mesh, memory, *times, ratio])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
