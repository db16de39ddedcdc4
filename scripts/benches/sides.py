"""Several decoders in turn on the same prompts in the same run: speed-ups, acceptance lengths, the replay check."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from spec_jax.audit.replay import Replay, replay
from spec_jax.engine.decoder import Decoder, Result
from spec_jax.models.load import LoadedTarget
from spec_jax.sampling.settings import Sampling

from . import runs


class Sides:
    """What was measured of each side; times are without prefill.

    Attributes:
        recompiles: programs compiled after the warm-up.
    """

    def __init__(
        self,
        decoders: Mapping[str, Decoder],
        cases: Sequence[runs.Case],
        args: argparse.Namespace,
        sampling: Sampling,
    ) -> None:
        """Warm up, then run every case on every side `args.repeats` times, the order of the sides turning.

        Every repeat starts with nothing learned, so that no side has seen its answer before.
        """
        self._cases, self._args, self._sampling = list(cases), args, sampling
        self._seconds: dict[tuple[str, str], list[float]] = {}
        self._results: dict[tuple[str, str], Result] = {}
        self._checked: dict[tuple[tuple[int, ...], tuple[int, ...]], Replay] = {}
        for decoder in decoders.values():
            runs.warm(decoder, cases[0], sampling)
        before = sum(d.programs for d in decoders.values())
        names = list(decoders)
        for repeat in range(args.repeats):
            for decoder in decoders.values():
                decoder.forget()
            for case in cases:
                for i in range(len(names)):
                    name = names[(i + repeat) % len(names)]
                    result, seconds, _ = runs.timed(decoders[name], case.ids, args.tokens, sampling, args.seed)
                    self._seconds.setdefault((name, case.name), []).append(seconds)
                    self._results[name, case.name] = result
            print(f"run {repeat + 1} of {args.repeats} done", file=sys.stderr)
        self.recompiles = sum(d.programs for d in decoders.values()) - before

    def tokens_per_second(self, side: str, cls: str | None = None) -> float:
        """Tokens of a class (None: of all) over the sum of its prompts' median times."""
        spent = sum(statistics.median(self._seconds[side, c.name]) for c in self._of(cls))
        return sum(len(self._results[side, c.name].tokens) for c in self._of(cls)) / spent

    def acceptance_length(self, side: str, cls: str) -> float:
        """Tokens per target pass."""
        results = self.results(side, cls)
        return sum(len(r.tokens) for r in results) / sum(r.counters["rounds"] for r in results)

    def results(self, side: str, cls: str | None = None) -> list[Result]:
        """The last run's, in the order of the cases."""
        return [self._results[side, c.name] for c in self._of(cls)]

    def counted(self, side: str, cls: str | None, model: LoadedTarget) -> Replay:
        """The replay check of a side's texts."""
        checks = [self.check(c, self._results[side, c.name].tokens, model) for c in self._of(cls)]
        return sum(checks, Replay(0, 0, 0))

    def check(self, case: runs.Case, tokens: tuple[int, ...], model: LoadedTarget) -> Replay:
        """The replay check of a case's text, made once for each text."""
        if (case.ids, tokens) not in self._checked:
            room = runs.room(self._cases, self._args.tokens)
            options: dict[str, Any] = {"key": self._args.seed, "sampling": self._sampling, "eos": model.eos_token_ids}
            self._checked[case.ids, tokens] = replay(
                model.target, model.params, case.ids, tokens, max_len=room, **options
            )
        return self._checked[case.ids, tokens]

    def _of(self, cls: str | None) -> list[runs.Case]:
        return [c for c in self._cases if cls in (None, c.cls)]
