"""Tokens per target pass of four exact ways to draft at temperature, at equal nodes, beside greedy decoding.

The drafter is the target with layers skipped, a distribution of its own. coupled: a tree ranked by law and noise, with
weights fitted while decoding; point: the same tree ranked by law alone; without_replacement: a tree of drawn siblings
(RSD), verified by recursive rejection; chain: a drawn chain, verified by p/q. The first two emit plain decoding's text.
greedy is the coupled tree at temperature 0. Speed plays no part: prompts are rows of one batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.drafters.model_tree import ModelTree
from spec_jax.engine import loop, rows
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.requests import request, stack
from spec_jax.engine.state import EngineState
from spec_jax.models import views
from spec_jax.models.load import LoadedTarget, load_target
from spec_jax.models.target import Target
from spec_jax.sampling.constraint import free
from spec_jax.topology.branching import Branching
from spec_jax.topology.growth import Growth
from spec_jax.verify.rejection import rejection

from . import intervals, output, prompts, schema

CLASSES = ("humaneval", "mtbench", "gsm8k")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    whole = functools.partial(parser.add_argument, type=int, metavar="N")
    several = functools.partial(parser.add_argument, nargs="+")
    parser.add_argument("--model", default="smollm2", help="smollm2 (default), a .gguf file or a model directory")
    several("--skip", type=int, default=[13, 14, 25], metavar="LAYER", help="layers left out of the drafter (13 14 25)")
    several("--temperatures", type=float, default=[0.6, 0.8, 1.0], metavar="T", help="temperatures (0.6 0.8 1.0)")
    several(
        "--widths", type=int, default=[1, 2, 2, 1, 1], metavar="N", help="children by depth of drawn trees (1 2 2 1 1)"
    )
    whole("--nodes", default=16, help="nodes of every draft, the root among them (16)")
    whole("--depth", default=7, help="depth of trees grown by score (7)")
    whole("--width", default=4, help="nodes expanded per level (4)")
    whole("--children", default=5, help="children offered by each (5)")
    whole("--prompts", default=10, help="prompts per class (10)")
    whole("--first", default=0, help="prompts per class passed over (0)")
    whole("--longest", default=192, help="longest prompt taken, in tokens (192)")
    whole("--rounds", default=14, help="rounds per prompt (14)")
    whole("--seed", default=0, help="key of the first prompt (0)")
    output.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Measure and print."""
    if args.quick:
        args.temperatures = args.temperatures[-1:]
        args.prompts, args.rounds = 1, 2
    model = load_target(args.model, stacked=False)
    view, params = views.skip(model.target, model.params, args.skip)
    sides = engines(args, model.target, view)
    ids = _prompts(model, args)
    shared = EngineParams(model.params, params, free(view.vocab_size), jnp.ones(1))
    start = _prefilled(sides["coupled"], shared, ids, args)
    found: dict[str, dict[str, float]] = {str(t): {} for t in args.temperatures}
    greedy = 0.0
    for name, engine in sides.items():
        decode = jax.jit(functools.partial(loop.decode, engine))
        for temperature in [0.0, *args.temperatures] if name == "coupled" else args.temperatures:
            after = decode(start.params, start.at(engine, temperature), args.rounds)
            mean, error = tokens_per_pass(after)
            print(f"T = {temperature} {name}: {mean:.3f} +- {error:.3f}{_weights(engine, after)}", file=sys.stderr)
            if temperature:
                found[str(temperature)][name] = mean
            else:
                greedy = mean
    output.finish({"temperatures": found, "greedy": greedy}, schema.load("coupling"), args, _plot)


def engines(args: argparse.Namespace, target: Target, view: Target) -> dict[str, Engine]:
    """An engine for each way to draft."""
    drawn = Branching(tuple(args.widths))
    if drawn.nodes != args.nodes:
        raise ValueError(f"--widths: got {args.widths}, {drawn.nodes} nodes, takes a tree of --nodes, {args.nodes}")
    grown = Growth(args.nodes, args.depth, args.width, args.children)
    make = lambda growth, **options: Engine(  # noqa: E731
        target, args.longest + 8 * args.rounds, drafter=ModelTree(view, growth), **options
    )
    return {
        "coupled": make(dataclasses.replace(grown, ranking="coupled")),
        "point": make(grown),
        "without_replacement": make(drawn, rule=rejection),
        "chain": make(Branching((1,) * (args.nodes - 1), replacement=True), rule=rejection),
    }


@dataclasses.dataclass(frozen=True)
class Start:
    """A prefilled batch, from which every side begins."""

    params: EngineParams
    state: EngineState

    def at(self, engine: Engine, temperature: float) -> EngineState:
        """The state of an engine with that temperature in every row."""
        old = self.state.rows
        empty = rows.empty(engine, self.params, old.length.shape[0])
        sampling = dataclasses.replace(old.sampling, temperature=jnp.full_like(old.sampling.temperature, temperature))
        drafter = dataclasses.replace(empty.drafter, model=self.state.drafter.model)
        kept = dataclasses.replace(old, sampling=sampling, counters=empty.rows.counters)
        return EngineState(kept, self.state.target, drafter, empty.controller)


def tokens_per_pass(state: EngineState) -> tuple[float, float]:
    """Emitted tokens over target passes, and its standard error over the rows."""
    emitted, passes = (np.asarray(x, float) for x in (state.rows.counters.emitted, state.rows.counters.rounds))
    return intervals.ratio(emitted, passes)


def _prefilled(engine: Engine, params: EngineParams, ids: list[list[int]], args: argparse.Namespace) -> Start:
    batch = stack([request(engine, p, key=args.seed + i) for i, p in enumerate(ids)])
    return Start(params, jax.jit(rows.init, static_argnums=0)(engine, params, batch))


def _prompts(model: LoadedTarget, args: argparse.Namespace) -> list[list[int]]:
    """Prompts of the classes in the model's chat format, those that are short enough, in the benchmark's order."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ValueError(f"--model: {args.model} has no tokenizer, which prompts in text need")
    found = []
    for cls in CLASSES:
        count, short = args.first + args.prompts, []
        for _, text in prompts.CLASSES[cls]():
            ids = tokenizer.encode(tokenizer.apply_chat([{"role": "user", "content": text}]), special=False)
            short += [ids] if len(ids) <= args.longest else []
            if len(short) == count:
                break
        if len(short) < count:
            raise ValueError(f"--prompts: got {args.prompts} behind {args.first}, {cls} has {len(short)} so short")
        found += short[args.first :]
    return found


def _weights(engine: Engine, state: EngineState) -> str:
    drafter = engine.drafter
    if not isinstance(drafter, ModelTree) or state.drafter.fit is None:
        return ""
    w = drafter.learner.weights(state.drafter.fit)
    a, b = (" ".join(f"{x:.2f}" for x in np.asarray(weights)) for weights in (w.a, w.b))
    return f" (a {a}, b {b})"


def _plot(result: dict[str, Any], figure: Any) -> None:
    axes, temperatures = figure.subplots(), list(result["temperatures"])
    for name in result["temperatures"][temperatures[0]]:
        axes.plot(temperatures, [result["temperatures"][t][name] for t in temperatures], marker="o", label=name)
    axes.axhline(result["greedy"], color="black", linewidth=0.8, label="greedy")
    axes.set(xlabel="temperature", ylabel="tokens per target pass", ylim=(1, None))
    axes.legend()
