"""Whether speculative text is plain decoding's: the replay check over five classes, greedy and sampled, batch 1 and 4.

Greedy, and temperature 0.8 with top-p 0.95. Every emitted token is compared with the choice of the target alone at a
reference width; `different` must be 0.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import choose

from spec_jax.audit.replay import Replay, replay
from spec_jax.models.load import load_target
from spec_jax.sampling.settings import Sampling

from . import output, runs, schema

_SETTINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, top_p=0.95)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    choose.add_model_arguments(parser)
    runs.add_arguments(parser)
    parser.add_argument("--seed", type=int, default=0)
    output.add_arguments(parser, plots=False)


def run(args: argparse.Namespace) -> None:
    """Generate, replay, count."""
    runs.quicken(args)
    model = load_target(args.model)
    cases = runs.cases(model, args)
    engine, drafter_params = choose.build(args, model, choose.config_of(args, "suffix_decoding"))
    engine = runs.fewer_widths(engine, args)
    result: dict[str, Any] = {}
    for batch in (1, 4):
        decoder = choose.decoder(model, engine, drafter_params, batch)
        for name, sampling in _SETTINGS.items():
            ids = [
                decoder.submit(c.ids, args.tokens, key=args.seed + i, sampling=sampling)[0] for i, c in enumerate(cases)
            ]
            done = {u.id: u.result for u in decoder.run(64) if u.result is not None}
            by_class = {cls: Replay(0, 0, 0) for cls in runs.classes(cases)}
            for i, (case, id) in enumerate(zip(cases, ids, strict=True)):
                by_class[case.cls] += replay(
                    model.target,
                    model.params,
                    case.ids,
                    done[id].tokens,
                    key=args.seed + i,
                    sampling=sampling,
                    eos=model.eos_token_ids,
                    max_len=runs.room(cases, args.tokens),
                )
            result[f"{name}_batch_{batch}"] = {cls: runs.merge([r]) for cls, r in by_class.items()}
            print(f"{name}, batch {batch}: {result[f'{name}_batch_{batch}']}", file=sys.stderr)
    output.finish(result, schema.load("text"), args)
