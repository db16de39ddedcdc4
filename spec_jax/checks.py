"""The checks of numbers among the settings of whatever has some: sizes, and numbers with a range."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def check_sizes(settings: Any, **least: int) -> None:
    """ValueError, naming the field, for one of `settings` that is no integer or is less than it may be."""
    for name, low in least.items():
        check_size(name, getattr(settings, name), low)


def check_size(name: str, value: Any, low: int) -> None:
    """ValueError, naming it, for a value that is no integer or is less than it may be."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name}: got {value!r}, takes an integer of at least {low}")


def check_number(
    name: str, value: Any, low: float, high: float = math.inf, integer: bool = False, open_low: bool = False
) -> None:
    """ValueError, naming the setting, for what is no number (or integer) in [low, high], or (low, high] if open_low.

    Neither NaN nor infinity is in any range.
    """
    kind = "an integer" if integer else "a number"
    right = isinstance(value, int | np.integer) if integer else isinstance(value, int | float | np.number)
    inside = right and not isinstance(value, bool) and low <= value <= high and not (open_low and value == low)
    if not inside or (high == math.inf and value == math.inf):
        raise ValueError(f"{name}: got {value!r}, takes {kind} in {'(' if open_low else '['}{low}, {high}]")
