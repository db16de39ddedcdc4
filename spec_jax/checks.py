"""The check of sizes among the settings of a drafter, a tree, a controller or an engine."""

from __future__ import annotations

from typing import Any


def check_sizes(settings: Any, **least: int) -> None:
    """ValueError, naming the field, for one of `settings` that is no integer or is less than it may be."""
    for name, low in least.items():
        value = getattr(settings, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ValueError(f"{name}: got {value!r}, takes an integer of at least {low}")
