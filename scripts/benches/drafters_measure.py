"""One target's drafters measured: drafts verified whole for acceptance, and cut by cost for speed."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import choose
import jax
import jax.numpy as jnp

from spec_jax.audit.replay import Replay
from spec_jax.engine.decoder import Decoder, Result
from spec_jax.models.load import LoadedTarget
from spec_jax.sampling.settings import Sampling

from . import intervals, runs
from .drafters_published import PUBLISHED
from .drafters_rules import ruled
from .drafters_systems import Row
from .sides import Sides

SETTINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=1.0)}
_PLAIN, _UNWANTED = "plain", 1e9
_TOGETHER = 8
"""Rows whose programs are held at once: on a CPU more of them fill the process's memory map (Linux: 65,530 parts)."""


@dataclasses.dataclass(frozen=True)
class Counts:
    """Emitted tokens and target passes of every prompt."""

    emitted: tuple[int, ...]
    passes: tuple[int, ...]

    @classmethod
    def of(cls, results: Sequence[Result]) -> Counts:
        """Those of results."""
        return cls(tuple(len(r.tokens) for r in results), tuple(r.counters["rounds"] for r in results))

    def figures(self) -> dict[str, Any]:
        """The acceptance length, tokens per target pass, and its interval over prompts."""
        sums = (self.emitted, self.passes)
        return {"acceptance_length": intervals.ratio(*sums)[0], "ci95": intervals.interval(*sums)}

    def over(self, other: Counts) -> dict[str, Any]:
        """How much longer these are than others on the same prompts (0.1: by a tenth), and the interval."""
        gain, ci = intervals.gain((self.emitted, self.passes), (other.emitted, other.passes))
        return {"part": gain, "ci95": ci}

    def loss(self, greedy: Counts) -> dict[str, Any]:
        """What part of greedy decoding's acceptance length is lost (0.1: a tenth), and the interval."""
        gain = self.over(greedy)
        ci = gain["ci95"]
        return {"part": -gain["part"], "ci95": None if ci is None else (-ci[1], -ci[0])}


def measure(
    model: LoadedTarget, plain: Any, rows: Mapping[str, Row], cases: Sequence[runs.Case], args: argparse.Namespace
) -> dict[str, Any]:
    """What `drafters.schema.json` says of a target's drafters.

    plain is the engine of plain decoding; args hold what `Sides` takes, `nodes`, `quick`, and `rules`: whether trees
    are measured under the other exact rules as well (with `quick` under two of them).
    """
    found: dict[str, Any] = {name: describe(row) for name, row in rows.items()}
    counts: dict[str, dict[str, Counts]] = {setting: {} for setting in SETTINGS}
    recompiles = 0
    for begin in range(0, len(rows), _TOGETHER):
        some = dict(list(rows.items())[begin : begin + _TOGETHER])
        figures, emitted, compiled = _together(model, plain, some, cases, args)
        recompiles += compiled
        for setting in SETTINGS:
            counts[setting] |= emitted[setting]
        for name in some:
            found[name] |= figures[name]
        gc.collect()
        jax.clear_caches()
    for name, row in rows.items():
        found[name] |= {f: found[name]["greedy"][f] for f in ("acceptance_length", "ci95", "speedup")}
        own = {setting: counts[setting][name] for setting in SETTINGS}
        found[name]["loss"] = own["sampled"].loss(own["greedy"])
        if args.rules and ruled(row.engine, args.nodes):
            found[name]["rules"] = rules(model, row, cases, args, own)
    return {"drafters": found, "deltas": deltas(counts, found), "recompiles": recompiles}


def _together(
    model: LoadedTarget, plain: Any, rows: Mapping[str, Row], cases: Sequence[runs.Case], args: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, dict[str, Counts]], int]:
    """Rows in turn with plain decoding: their figures, what they emitted by setting, and what was recompiled."""
    decoders = {_PLAIN: choose.decoder(model, plain)}
    decoders |= {name: choose.decoder(model, row.engine, row.params) for name, row in rows.items()}
    found: dict[str, Any] = {name: {} for name in rows}
    counts: dict[str, dict[str, Counts]] = {}
    recompiles = 0
    for setting, sampling in SETTINGS.items():
        sides = Sides(decoders, cases, args, sampling)
        recompiles += sides.recompiles
        counts[setting] = {}
        for name in rows:
            results = whole(decoders[name], cases, args, sampling)
            checks = [sides.check(c, r.tokens, model) for c, r in zip(cases, results, strict=True)]
            texts = [sides.counted(name, None, model), sum(checks, Replay(0, 0, 0))]
            counts[setting][name] = Counts.of(results)
            found[name][setting] = counts[setting][name].figures() | {
                "speedup": sides.tokens_per_second(name) / sides.tokens_per_second(_PLAIN),
                "classes": by_class(cases, results),
                "class_speedups": {
                    cls: sides.tokens_per_second(name, cls) / sides.tokens_per_second(_PLAIN, cls)
                    for cls in runs.classes(list(cases))
                },
                "same_text": runs.merge(texts),
            }
            print(f"{name}, {setting}: {found[name][setting]}", file=sys.stderr)
    return found, counts, recompiles


def describe(row: Row) -> dict[str, Any]:
    """Where a row comes from, and the size of its drafts."""
    drafter = row.engine.drafter
    about = {"config": row.config, "nodes": drafter.nodes - 1, "depth": drafter.depth}
    return about | {k: v for k, v in (("weights", row.weights), ("joined", row.joined)) if v is not None}


def whole(decoder: Decoder, cases: Sequence[runs.Case], args: argparse.Namespace, sampling: Sampling) -> list[Result]:
    """Every case with all drafts verified whole, starting with nothing learned; the decoder has run before.

    By a cost that makes the widest pass the best, so nothing is compiled for it.
    """
    measured = decoder.params
    cost = jnp.full_like(measured.cost, _UNWANTED).at[-1].set(1.0)
    decoder.params = dataclasses.replace(measured, cost=cost)
    try:
        decoder.forget()
        return [runs.timed(decoder, case.ids, args.tokens, sampling, args.seed)[0] for case in cases]
    finally:
        decoder.params = measured
        decoder.forget()


def by_class(cases: Sequence[runs.Case], results: Sequence[Result]) -> dict[str, float]:
    """The acceptance length of each class."""
    found = {}
    for cls in runs.classes(list(cases)):
        some = Counts.of([r for c, r in zip(cases, results, strict=True) if c.cls == cls])
        found[cls] = sum(some.emitted) / sum(some.passes)
    return found


def rules(
    model: LoadedTarget, row: Row, cases: Sequence[runs.Case], args: argparse.Namespace, own: Mapping[str, Counts]
) -> dict[str, dict[str, Any]]:
    """Acceptance lengths at temperature 1 under the other exact rules, at as many nodes.

    own are the row's counts by setting: what each rule loses of greedy decoding's, and coupled drafts gain over it.
    """
    found = {}
    for name, engine in list(ruled(row.engine, args.nodes).items())[: 2 if args.quick else None]:
        results = whole(choose.decoder(model, engine, row.params), cases, args, SETTINGS["sampled"])
        counts = Counts.of(results)
        sizes = {"nodes": engine.drafter.nodes - 1, "depth": engine.drafter.depth}
        compared = {"loss": counts.loss(own["greedy"]), "coupled_over": own["sampled"].over(counts)}
        found[name] = counts.figures() | sizes | compared
        print(f"{name}: {found[name]}", file=sys.stderr)
    return found


def deltas(counts: Mapping[str, Mapping[str, Counts]], found: Mapping[str, Any]) -> dict[str, Any]:
    """Every published gain whose two rows were measured, beside ours.

    A gain in acceptance length has an interval over the same prompts; one in speed has none.
    """
    result: dict[str, Any] = {}
    for delta in PUBLISHED:
        if delta.row not in found or delta.base not in found:
            continue
        entry: dict[str, Any] = {"published": delta.gain, "measure": delta.measure, "source": delta.source}
        for setting, by_name in counts.items():
            gain, ci = by_name[delta.row].over(by_name[delta.base]).values()
            speed = found[delta.row][setting]["speedup"] / found[delta.base][setting]["speedup"] - 1
            entry[setting] = {"acceptance_length": gain, "ci95": ci, "speedup": speed}
        result[delta.name] = entry
    return result
