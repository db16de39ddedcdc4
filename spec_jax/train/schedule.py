"""Learning rates that warm up, stay, and decay: by steps, or by the clock."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Protocol


class Schedule(Protocol):
    """The learning rate of a step, or None once training is over."""

    def __call__(self, step: int) -> float | None:
        """The rate of the step with this number, counted from 0."""
        ...


@dataclasses.dataclass(frozen=True)
class BySteps:
    """Warm-up, a stable phase and a linear decay (WSD, arXiv 2404.06395, section 4) over a number of steps.

    peak: the rate of the stable phase. The rate rises over the first `warmup` steps and falls over the last `decay` of
    `total` to `floor` times the peak.
    """

    peak: float
    warmup: int
    total: int
    decay: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers of steps."""
        _check(self)
        if not 0 <= self.decay <= self.total:
            raise ValueError(f"decay: got {self.decay}, takes 0 to total, {self.total}")

    def __call__(self, step: int) -> float | None:
        """See Schedule."""
        if step >= self.total:
            return None
        return _rate(self, step, (self.total - step) / max(self.decay, 1))


@dataclasses.dataclass(frozen=True)
class ByClock:
    """The same by the time of day, for a machine whose speed nobody promises.

    stop: when training is over, in seconds of `now`; decay: seconds before it at which the rate begins to fall. Warm-up
    is still in steps. Two runs by the clock differ: use BySteps for a run that must come out the same.
    """

    peak: float
    warmup: int
    stop: float
    decay: float
    floor: float = 0.0
    now: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        """Check the rate and the times."""
        _check(self)
        if self.decay < 0:
            raise ValueError(f"decay: got {self.decay}, takes seconds, 0 or more")

    def __call__(self, step: int) -> float | None:
        """See Schedule."""
        left = self.stop - self.now()
        return None if left <= 0 else _rate(self, step, left / max(self.decay, 1e-9))


def _check(schedule: BySteps | ByClock) -> None:
    if not schedule.peak > 0:
        raise ValueError(f"peak: got {schedule.peak}, takes a learning rate over 0")
    if schedule.warmup < 0:
        raise ValueError(f"warmup: got {schedule.warmup}, takes steps, 0 or more")
    if not 0 <= schedule.floor <= 1:
        raise ValueError(f"floor: got {schedule.floor}, takes a part of the peak, 0 to 1")


def _rate(schedule: BySteps | ByClock, step: int, left: float) -> float:
    fall = schedule.floor + (1 - schedule.floor) * min(1.0, left)
    return schedule.peak * min(1.0, (step + 1) / (schedule.warmup + 1)) * fall
