"""How close each verifier rule comes to the best possible, at one node with 1 to 4 siblings and on whole drafts.

At one node: the chance that a sibling is accepted, and what part it is of the optimum for such candidates (a linear
program); for candidates that are chosen, not drawn, the optimum for independent draws is the yardstick, which they may
beat. On whole drafts: mean accepted tokens of the rules that differ there, a chain of 3 and a binary tree of 3 levels,
over order-1 tables. Tables of 5 tokens: ADV (a drafter that is wrong where it is sure), RND, and random ones.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import noise
from spec_jax.audit.transport import Acceptance, acceptance, optimum
from spec_jax.sampling.constraint import free
from spec_jax.sampling.history import History
from spec_jax.sampling.settings import Sampling, to_row
from spec_jax.topology.sampled import branching
from spec_jax.verify.importance import importance
from spec_jax.verify.kseq import kseq
from spec_jax.verify.match import match
from spec_jax.verify.rejection import point_mass, rejection
from spec_jax.verify.resispec import resispec
from spec_jax.verify.scores import Scores
from spec_jax.verify.traversal import traversal

from . import output, schema

_RULES = {
    "rejection": (rejection, "sampled"),
    "K-SEQ": (kseq, "sampled"),
    "ResiSpec": (resispec, "sampled"),
    "importance": (importance, "sampled"),
    "rejection, no repeats": (rejection, "without_replacement"),
    "point mass, top k": (point_mass, "point"),
    "match, coupled top k": (match, "coupled"),
}
_WHOLE = {"chain of 3": (1, 1, 1), "binary tree of 3 levels": (2, 2, 2)}
_ADV = ([0.1, 0.1, 0.1, 0.35, 0.35], [0.6, 0.05, 0.05, 0.29, 0.01])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    parser.add_argument("--siblings", type=int, default=4, metavar="K", help="measure 1 .. K siblings (4)")
    parser.add_argument("--tables", type=int, default=8, metavar="N", help="random tables (8)")
    parser.add_argument("--runs", type=int, default=40_000, metavar="N", help="of each rule for each figure (40000)")
    parser.add_argument("--seed", type=int, default=0, help="of the random tables and the runs (0)")
    output.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Measure, print, draw."""
    if min(args.siblings, args.tables, args.runs) < 1:
        raise ValueError(
            f"--siblings, --tables, --runs: got {args.siblings}, {args.tables}, {args.runs}, take 1 or more"
        )
    if args.quick:
        args.siblings, args.tables, args.runs = min(args.siblings, 2), 2, 2000
    result = {"one_node": one_node(args), "whole_drafts": whole_drafts(args)}
    output.finish(result, schema.load("rules"), args, plot)


def one_node(args: argparse.Namespace) -> dict[str, Any]:
    """For each set of tables and rule, by number of siblings: acceptance, its error, the optimum, and their ratio."""
    found: dict[str, Any] = {}
    for name, tables in _tables(args).items():
        found[name] = {rule: [_mean(args, rule, tables, k) for k in range(1, args.siblings + 1)] for rule in _RULES}
        for rule, row in found[name].items():
            figures = "  ".join(f"{x['acceptance']:.3f} ({100 * x['of_optimum']:5.1f} %)" for x in row)
            print(f"{name:8} {rule:24} {figures}", file=sys.stderr)
    return found


def _mean(args: argparse.Namespace, name: str, tables: list[Any], k: int) -> dict[str, float]:
    rule, proposal = _RULES[name]
    drawn = [
        acceptance(rule, p, q, k, proposal, runs=args.runs, width=args.siblings, seed=args.seed) for p, q in tables
    ]
    best = [optimum(p, q, k, proposal != "without_replacement") for p, q in tables]
    return {
        "siblings": k,
        "acceptance": statistics.mean(a.chance for a in drawn),
        "standard_error": _error(drawn),
        "optimum": statistics.mean(best),
        "of_optimum": statistics.mean(a.chance / b for a, b in zip(drawn, best, strict=True)),
    }


def _error(drawn: list[Acceptance]) -> float:
    return sum(a.standard_error**2 for a in drawn) ** 0.5 / len(drawn)


def whole_drafts(args: argparse.Namespace) -> dict[str, Any]:
    """For each shape and set of tables, mean accepted tokens of rejection and traversal on the same drafts."""
    found: dict[str, Any] = {}
    for shape, widths in _WHOLE.items():
        for proposal in ("sampled", "without_replacement"):
            if proposal == "without_replacement" and max(widths) == 1:
                continue
            label = shape if proposal == "sampled" else f"{shape}, no repeats"
            found[label] = {}
            for name, pairs in _order_one(args).items():
                rates = {
                    rule.__name__: statistics.mean(
                        float(_accepted(rule, widths, proposal, args.runs, jnp.asarray(p), jnp.asarray(q), args.seed))
                        for p, q in pairs
                    )
                    for rule in (rejection, traversal)
                }
                found[label][name] = rates
                print(f"{label:36} {name:8} {rates}", file=sys.stderr)
    return found


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _accepted(rule: Any, widths: Any, proposal: str, runs: int, log_p: Any, log_q: Any, seed: int) -> Any:
    vocab, position, zero = log_p.shape[1], jnp.int32(1), jnp.int32(0)
    row = to_row(Sampling(temperature=1.0), vocab)

    def one(key: Any) -> Any:
        anchor = noise.threefry(key, np.uint32(0), jnp.uint32(0))[0] % vocab
        draft = branching(
            key, anchor.astype(jnp.int32), lambda token, _: log_q[token], widths, position, proposal == "sampled"
        )
        logits = log_p[draft.tree.tokens]
        scores = Scores(logits, row, History(zero, zero), position, free(vocab), adjusted=False)
        return rule(key, draft, scores, len(widths) + 1).accepted

    keys = jax.random.bits(jax.random.key(seed), (runs, 2), jnp.uint32)
    return jax.vmap(one)(keys).mean()


def _tables(args: argparse.Namespace) -> dict[str, list[Any]]:
    rng = np.random.default_rng(args.seed)
    target, draft = _rnd()
    rows = list(zip(_softmax(target), _softmax(draft), strict=True))
    random = [tuple(rng.dirichlet(np.ones(5), 2)) for _ in range(args.tables)]
    return {"ADV": [_ADV], "RND": rows, "random": random}


def _order_one(args: argparse.Namespace) -> dict[str, list[Any]]:
    rng = np.random.default_rng(args.seed)
    order = np.stack([np.random.default_rng(i).permutation(5) for i in range(5)])
    adversarial = tuple(np.log(np.array(law)[order]).astype(np.float32) for law in _ADV)
    rnd = tuple(np.log(_softmax(z[:5])).astype(np.float32) for z in _rnd())
    random = [np.log(rng.dirichlet(np.ones(5), (2, 5))).astype(np.float32) for _ in range(args.tables)]
    return {"ADV": [adversarial], "RND": [rnd], "random": [tuple(x) for x in random]}


def _rnd() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    target = rng.normal(0, 1.2, (6, 5))
    return target, 0.6 * target + rng.normal(0, 0.9, (6, 5))


def _softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def plot(result: dict[str, Any], figure: Any) -> None:
    """Part of the optimum reached, over the number of siblings; a panel for each set of tables."""
    panels = figure.subplots(1, len(result["one_node"]), sharey=True, squeeze=False)[0]
    for axes, (name, rules) in zip(panels, result["one_node"].items(), strict=True):
        siblings = [x["siblings"] for x in rules["rejection"]]
        for rule, row in rules.items():
            axes.plot(siblings, [x["of_optimum"] for x in row], marker="o", label=rule)
        axes.set(title=name, xlabel="siblings", xticks=siblings)
    panels[0].set_ylabel("acceptance / optimum")
    panels[-1].legend(fontsize="x-small")
