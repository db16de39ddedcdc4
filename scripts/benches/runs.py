"""What the benches on real prompts share: the prompts as token ids, and timed runs of a decoder."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

from spec_jax.engine.decoder import Decoder, Result
from spec_jax.engine.engine import Engine
from spec_jax.models.load import LoadedTarget
from spec_jax.sampling.settings import Sampling

from . import held_out, prompts

CLASSES = ("code-edit", "humaneval", "mtbench", "gsm8k", "summary")


@dataclasses.dataclass(frozen=True)
class Case:
    """One prompt in token ids."""

    name: str
    cls: str
    ids: tuple[int, ...]


def add_arguments(parser: argparse.ArgumentParser, prompts: int = 4, tokens: int = 384, repeats: int = 3) -> None:
    """Add --prompts, --tokens and --repeats, with these defaults."""
    whole = functools.partial(parser.add_argument, type=int, metavar="N")
    whole("--prompts", default=prompts, help=f"prompts per class ({prompts})")
    whole("--tokens", default=tokens, help=f"most new tokens per prompt ({tokens})")
    whole("--repeats", default=repeats, help=f"runs of which the median counts ({repeats})")


def quicken(args: argparse.Namespace) -> None:
    """Make --quick mean a minute at most."""
    if args.quick:
        args.prompts, args.tokens, args.repeats = 1, min(args.tokens, 16), 1


def fewer_widths(engine: Engine, args: argparse.Namespace) -> Engine:
    """The engine; with --quick only its narrowest and widest pass, since most of a short run is compiling."""
    if not args.quick:
        return engine
    return dataclasses.replace(engine, widths=tuple(sorted({engine.widths[0], engine.widths[-1]})))


def cases(model: LoadedTarget, args: argparse.Namespace, classes: Sequence[str] = CLASSES) -> list[Case]:
    """The prompts of the classes, in the model's chat format.

    A model without a chat format goes on with files of the standard library that the small hybrid has not seen, as
    the one class held-out.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ValueError(f"--model: {args.model} has no tokenizer, which prompts in text need")
    if tokenizer.chat_template is None:
        found = [Case(name, held_out.CLASS, ids) for name, ids in held_out.beginnings(tokenizer, args.prompts)]
    else:
        encode = lambda p: tuple(tokenizer.encode(tokenizer.apply_chat(p.messages), special=False))  # noqa: E731
        found = [Case(p.name, cls, encode(p)) for cls in classes for p in prompts.load(cls, args.prompts)]
    for case in found:
        if len(case.ids) + args.tokens > args.max_len:
            raise ValueError(
                f"--max-len: got {args.max_len}, takes at least {len(case.ids) + args.tokens} for {case.name}"
            )
    return found


def classes(cases: list[Case]) -> list[str]:
    """The classes of the cases, in order."""
    return list(dict.fromkeys(case.cls for case in cases))


def room(cases: list[Case], tokens: int) -> int:
    """Length of the longest text that the cases can come to, rounded up: the replays then share one program."""
    return -(-(max(len(c.ids) for c in cases) + tokens) // 64) * 64


def timed(
    decoder: Decoder, ids: tuple[int, ...], tokens: int, sampling: Sampling, key: int
) -> tuple[Result, float, float]:
    """A request's result, its seconds without prefill, and its seconds with it."""
    start = time.perf_counter()
    decoder.submit(ids, tokens, key=key, sampling=sampling)
    decoder.prefill()
    begin = time.perf_counter()
    result = [update.result for update in decoder.run(chunk_rounds=1024) if update.result][-1]
    end = time.perf_counter()
    return result, end - begin, end - start


def warm(decoder: Decoder, case: Case, sampling: Sampling) -> None:
    """Compile every program and let the decoder measure its costs."""
    timed(decoder, case.ids, 4, sampling, 0)


def merge(counts: list[Any]) -> dict[str, int]:
    """Replay counts added up, as a plain dict."""
    return {f: sum(getattr(c, f) for c in counts) for f in ("equal", "near_tie", "different")}
