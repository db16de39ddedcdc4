"""Typed reads of a parsed config.json: every error names the field, what it got and what it takes.

A field that is null counts as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def require(condition: bool, name: str, value: Any, taken: str) -> None:
    """ValueError saying what a field is and what it takes, unless the condition holds."""
    if not condition:
        raise ValueError(f"{name} is {value!r}; taken: {taken}")


def is_whole(value: Any, least: int = 0) -> bool:
    """Whether a value is an integer from `least`, under 2**31."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31


def is_size(value: Any) -> bool:
    """Whether a value is a positive integer under 2**31."""
    return is_whole(value, 1)


def is_positive(value: Any) -> bool:
    """Whether a value is a positive number, in the range of float32."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e38  # NaN is not


def read(fields: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """A field as it is, or the default where it is absent."""
    return default if fields.get(name) is None else fields[name]


def size_of(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive integer; without a default it must be there."""
    value = read(fields, name, default)
    require(is_size(value), name, value, "a positive integer under 2**31")
    return value


def count_of(fields: Mapping[str, Any], name: str, default: int) -> int:
    """An integer, 0 or more."""
    value = read(fields, name, default)
    require(is_whole(value), name, value, "an integer, 0 or more")
    return value


def token_of(fields: Mapping[str, Any], name: str, vocab_size: int) -> int:
    """A token id, which must be there."""
    value: Any = fields.get(name)
    require(is_whole(value) and value < vocab_size, name, value, f"a token id under vocab_size, {vocab_size}")
    return value


def number_of(fields: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A positive number; without a default it must be there."""
    value = read(fields, name, default)
    require(is_positive(value), name, value, "a positive number")
    return float(value)


def flag_of(fields: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """True or false."""
    value = read(fields, name, default)
    require(isinstance(value, bool), name, value, "true or false")
    return value


def object_of(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object, empty where it is absent."""
    value = read(fields, name, {})
    require(isinstance(value, Mapping), name, value, "an object")
    return dict(value)


def ids_of(fields: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    """A list of layers' numbers, not empty; None where it is absent."""
    value = fields.get(name)
    listed = isinstance(value, list) and bool(value) and all(map(is_whole, value))
    require(value is None or listed, name, value, "a list of integers, 0 or more")
    return None if value is None else tuple(value)


def kinds_of(fields: Mapping[str, Any], layers: int) -> tuple[str, ...] | None:
    """The list `layer_types`, a text for every layer; None where it is absent."""
    name, value = "layer_types", fields.get("layer_types")
    listed = isinstance(value, list) and len(value) == layers and all(isinstance(kind, str) for kind in value)
    require(value is None or listed, name, value, f"a list of {layers} layers' kinds")
    return None if value is None else tuple(value)


def first_windowed(fields: Mapping[str, Any], layers: int, first: int | None = None) -> int:
    """The first layer with a sliding window as Qwen's configs say it: `max_window_layers` if `first` is None.

    `layers` where no layer has one.
    """
    windowed = flag_of(fields, "use_sliding_window") and fields.get("sliding_window") is not None
    first = count_of(fields, "max_window_layers", 28) if first is None else first
    return first if windowed else layers


def require_only(fields: Mapping[str, Any], *known: tuple[str, Any, tuple[Any, ...]]) -> None:
    """ValueError for a field that is none of the values taken; known: (name, value where it is not there, taken)."""
    for name, default, taken in known:
        value = fields.get(name, default)
        same = [value == x and isinstance(value, bool) == isinstance(x, bool) for x in taken]  # 1 is not true
        require(any(same), name, value, " or ".join(map(repr, taken)))
