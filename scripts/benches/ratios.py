"""Ratios of times measured in turn in one run: load that comes and goes hits all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


def in_turn(
    functions: Mapping[str, Callable[..., Any]],
    repeats: int,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    setup: Callable[[], tuple[Any, ...]] = tuple,
) -> dict[str, list[float]]:
    """Seconds of every function, `repeats` of each; results that are arrays are waited for.

    `setup` makes each call's arguments, outside the time that counts. Each round runs all functions once, the next
    round starting one function later, so that none is always the first. The first `warm_up` rounds are not counted.
    Raises ValueError without a function or a round.
    """
    if not functions:
        raise ValueError("functions: got none, takes at least one")
    if repeats < 1 or warm_up < 0:
        raise ValueError(f"repeats, warm_up: got {repeats}, {warm_up}, take at least 1 and 0")
    names, seconds = list(functions), {name: [] for name in functions}
    for turn in range(-warm_up, repeats):
        for i in range(len(names)):
            name = names[(i + turn) % len(names)]
            given = jax.block_until_ready(setup())
            start = clock()
            jax.block_until_ready(functions[name](*given))
            if turn >= 0:
                seconds[name].append(clock() - start)
    return seconds


def median_ratio(baseline: Sequence[float], candidate: Sequence[float]) -> dict[str, float]:
    """The speed-up of `candidate` over `baseline`, seconds of the same rounds of one run.

    Returns the median, least and greatest of the rounds' ratios (2.0: half the time) and their number, and raises
    ValueError for no rounds, rounds that don't pair, or a time that is not positive.
    """
    if not baseline or len(baseline) != len(candidate):
        raise ValueError(f"baseline, candidate: got {len(baseline)} and {len(candidate)} times, take as many of each")
    if min(*baseline, *candidate) <= 0:
        raise ValueError("baseline, candidate: got a time that is not positive")
    ratios = [b / c for b, c in zip(baseline, candidate, strict=True)]
    return {"median": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios), "rounds": len(ratios)}
