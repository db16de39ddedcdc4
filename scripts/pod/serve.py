"""The serving loop: requests into a decoder as slots come free, results out as they finish."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from spec_jax.engine.decoder import Decoder, Result

from .prompts import Asked


@dataclasses.dataclass
class Totals:
    """What this run of a host has done so far."""

    prompts: int = 0
    tokens: int = 0
    passes: int = 0
    seconds: float = 0.0
    finish: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def acceptance_length(self) -> float:
        """Tokens per target pass."""
        return self.tokens / max(1, self.passes)


def serve(
    decoder: Decoder,
    asked: Sequence[Asked],
    done: Callable[[Asked, Result, float], None],
    chunk_rounds: int = 16,
    tell: Callable[[Totals], None] = lambda _: None,
) -> Totals:
    """Run all requests; `done` gets each with its result and the seconds since it was submitted, as they finish.

    `tell` is called once a chunk. Twice the slots are queued at most: requests on their way hold device memory.
    """
    waiting, running, totals, begin = deque(asked), {}, Totals(), time.perf_counter()
    while waiting or running:
        while waiting and len(running) < 2 * decoder.batch:
            a = waiting.popleft()
            (id,) = decoder.submit(a.ids, a.max_new_tokens, key=a.key, sampling=a.sampling, stop_strings=a.stop)
            running[id] = a, time.perf_counter()
        for update in decoder.step(chunk_rounds):
            if update.result is None:
                continue
            a, since = running.pop(update.id)
            totals.prompts += 1
            totals.tokens += len(update.result.tokens)
            totals.passes += update.result.counters["rounds"]
            totals.finish[update.result.finish] += 1
            done(a, update.result, time.perf_counter() - since)
        totals.seconds = time.perf_counter() - begin
        tell(totals)
    return totals


def teller(host: int, count: int, before: int, every: float) -> Callable[[Totals], None]:
    """Prints a host's progress to stderr, every so many seconds and at the end."""
    last = [time.perf_counter()]

    def tell(t: Totals) -> None:
        now = time.perf_counter()
        if now - last[0] < every and t.prompts < count:
            return
        last[0] = now
        speed = t.tokens / max(t.seconds, 1e-9)
        left = f"{(count - t.prompts) * t.seconds / t.prompts:.0f} s left" if t.prompts else "none finished yet"
        print(
            f"host {host}: {before + t.prompts} of {before + count} prompts, {t.tokens} tokens, {speed:.1f} tokens/s, "
            f"acceptance length {t.acceptance_length:.2f}, {left}",
            file=sys.stderr,
            flush=True,
        )

    return tell
