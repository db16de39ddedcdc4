"""Compiles a round (draft, score, accept, commit) of published models for TPU pods: libtpu alone, no chip, no weights.

Prints memory, collectives and seconds per chip for drafts of N nodes, keeps them in a table (`CostModel.from_compiler`
reads the project's), and ends in a line of JSON whose schema is pods_aot/pods.schema.json. docs/pods_cost.md says what
the seconds count. A compilation takes a minute or so; what the table has is not compiled again.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import choose  # noqa: E402
from pods_aot import shapes, table  # noqa: E402

from benches import output, schema  # noqa: E402


def main() -> None:
    """Parse, compile what is missing, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = sorted({case.name for case in shapes.CASES})
    topologies = sorted({case.topology for case in shapes.CASES})
    parser.add_argument("--name", choices=names, action="append", help="models (all)")
    parser.add_argument("--topology", choices=topologies, action="append", help="slices (all)")
    parser.add_argument("--nodes", type=int, nargs="+", metavar="N", help="sizes of drafts, root and all (1 2 4 .. 64)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="where results are kept (the project's own)")
    parser.add_argument("--hlo", type=Path, metavar="FOLDER", help="keep each compiled program's text there, gzipped")
    output.add_arguments(parser)
    args = parser.parse_args()
    if args.hlo is not None and not args.hlo.is_dir():
        raise ValueError(f"--hlo: got {args.hlo}, takes a folder that is there")
    if args.quick and (args.name or args.topology):
        raise ValueError("--quick: got --name or --topology beside it, takes a model of its own")
    for n in args.nodes or ():
        if n < 1:
            raise ValueError(f"--nodes: got {n}, takes integers from 1")
    known = shapes.QUICK if args.quick else shapes.CASES
    cases = [c for c in known if c.name in (args.name or [c.name]) and c.topology in (args.topology or [c.topology])]
    if not cases:
        there = ", ".join(case.key for case in known)
        raise ValueError(f"--name, --topology: got no case of {args.name} on {args.topology}, takes {there}")
    nodes = args.nodes or ((1, 4) if args.quick else shapes.NODES)
    with tempfile.TemporaryDirectory() as folder:
        place = args.table or (Path(folder) / "pods.json" if args.quick else table.PROJECT)
        found = table.fill(place, cases, nodes, functools.partial(table.measured, texts=args.hlo))
    print(table.markdown(found))
    result = table.summary(found)
    for key, x in result["shapes"].items():
        if {"1", "16"} <= x["seconds"].keys():
            ratio, memory = x["seconds"]["16"] / x["seconds"]["1"], x["hbm_gib_by_nodes"]["16"]
            fits = "fits" if memory <= x["chip_gib"] else "DOES NOT FIT"
            print(f"{key}: c(16)/c(1) = {ratio:.3f}; N=16 {fits}: {memory:.2f} of {x['chip_gib']} GiB a chip")
    output.finish(result, schema.load("pods", Path(table.__file__).parent), args, plot)


def plot(result: dict[str, Any], figure: Any) -> None:
    """Milliseconds and memory over the number of nodes."""
    left, right = figure.subplots(1, 2)
    for key, x in result["shapes"].items():
        nodes = [int(n) for n in x["seconds"]]
        left.loglog(nodes, [1e3 * s for s in x["seconds"].values()], "o-", label=key)
        right.semilogx(nodes, list(x["hbm_gib_by_nodes"].values()), "o-", label=key)
    left.set(xlabel="nodes", ylabel="milliseconds a round")
    right.set(xlabel="nodes", ylabel="GiB a chip")
    left.legend()


if __name__ == "__main__":
    choose.run(main)
