"""How sure a figure over prompts is: ratios of sums, with prompts as the independent draws.

Each prompt's part in the error is how far it departs from the ratio (the delta method); intervals are Student's t over
the prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

Interval = tuple[float, float]


def ratio(above: Sequence[float] | np.ndarray, below: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """sum(above) / sum(below) over prompts, and its standard error (0 for one prompt)."""
    a, b = _paired(above, below)
    mean = a.sum() / b.sum()
    return float(mean), float(_spread(a - mean * b) / b.sum())


def interval(above: Sequence[float], below: Sequence[float], level: float = 0.95) -> Interval | None:
    """The ratio's interval at that level; None for one prompt, which says nothing of others."""
    mean, error = ratio(above, below)
    if len(above) < 2:
        return None
    reach = _quantile(len(above), level) * error
    return mean - reach, mean + reach


def gain(
    one: tuple[Sequence[float], Sequence[float]], other: tuple[Sequence[float], Sequence[float]], level: float = 0.95
) -> tuple[float, Interval | None]:
    """How much greater one ratio is than another on the same prompts (0.1: by a tenth), and the interval.

    Prompts are paired, so what is hard for both cancels; the error is that of the ratios' quotient, in logs.
    """
    (a, b), (c, d) = _paired(*one), _paired(*other)
    if len(a) != len(c):
        raise ValueError(f"one, other: got {len(a)} and {len(c)} prompts, take the same ones")
    first, second = a.sum() / b.sum(), c.sum() / d.sum()
    quotient = float(first / second)
    if len(a) < 2:
        return quotient - 1, None
    error = _spread((a - first * b) / a.sum() - (c - second * d) / c.sum())
    reach = float(np.exp(_quantile(len(a), level) * error))
    return quotient - 1, (quotient / reach - 1, quotient * reach - 1)


def _paired(above: Any, below: Any) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.asarray(above, float), np.asarray(below, float)
    if a.ndim != 1 or a.shape != b.shape or not len(a):
        raise ValueError(f"above, below: got shapes {a.shape} and {b.shape}, take a number of each per prompt")
    return a, b


def _spread(departures: np.ndarray) -> float:
    n = len(departures)
    return float(((departures**2).sum() * n / max(1, n - 1)) ** 0.5)


def _quantile(prompts: int, level: float) -> float:
    return float(stats.t.ppf((1 + level) / 2, prompts - 1))
