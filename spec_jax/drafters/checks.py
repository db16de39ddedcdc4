"""The checks that several drafters make of their settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def check_follows(name: str, drafter: Any) -> None:
    """ValueError, naming the field, for a drafter that takes every draft for its own: its `keeps_draft` is True."""
    if getattr(drafter, "keeps_draft", False):
        raise ValueError(f"{name}: got a {type(drafter).__name__}, takes one that keeps no state of its drafts")


def check_rates(rates: Sequence[float], vocab_size: int) -> None:
    """ValueError for chances by rank that are more than there are tokens, not descending, or no chances."""
    if not 1 <= len(rates) <= vocab_size:
        raise ValueError(f"rates: got {len(rates)} of them, takes 1 .. vocab_size, which is {vocab_size}")
    if not all(0 < r < 1 for r in rates) or list(rates) != sorted(rates, reverse=True):
        raise ValueError(f"rates: got {rates}, takes numbers in (0, 1), descending")
