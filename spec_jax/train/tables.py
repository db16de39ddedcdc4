"""Settings dataclasses from the tables of a configuration file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from spec_jax.models.config import check_types

T = TypeVar("T")

_OF_THE_TARGET = ("mask_token", "adapter")
"""Fields whose range the target's sizes give: what is built for a target checks them."""


class Settings:
    """Base of the frozen dataclasses of settings whose fields' types say all that they take without a target."""

    def __post_init__(self) -> None:
        """ValueError, naming the field, for a value that is not of its field's type."""
        kind: Any = type(self)
        check_types(kind, {name: value for name, value in vars(self).items() if name not in _OF_THE_TARGET})


def of_mapping(name: str, settings: Any) -> dict[str, Any]:
    """A table as a dict; ValueError, naming it, for what is none."""
    if not isinstance(settings, Mapping):
        raise ValueError(f"{name}: got {settings!r}, takes a table, name = value")
    return dict(settings)


def table(kind: type[T], settings: Any, name: str) -> T:
    """A dataclass from a table; lists become tuples. ValueError for an entry that is none, or one that is missing."""
    assert dataclasses.is_dataclass(kind)
    given = of_mapping(name, settings)
    known = {f.name for f in dataclasses.fields(kind) if f.init}
    if unknown := set(given) - known:
        raise ValueError(f"{name}: got {sorted(unknown)}, takes some of {', '.join(sorted(known))}")
    try:
        return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
    except TypeError as wrong:
        raise ValueError(f"{name}: got {given}: {wrong}") from wrong


def sizes(target: Any, intermediate_size: int | None) -> dict[str, Any]:
    """A drafter's sizes after its target's."""
    inner = intermediate_size or getattr(target, "intermediate_size", None) or 4 * target.hidden_size
    same = ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps")
    return {name: getattr(target, name) for name in (*same, "max_position_embeddings")} | {"intermediate_size": inner}


def tapped(given: tuple[int, ...] | None, default: tuple[int, ...], target: Any) -> tuple[int, ...]:
    """The tapped layers, as given or by default; ValueError for one that the target lacks."""
    found, layers = default if given is None else given, target.num_layers
    if not all(0 <= tap <= layers for tap in found):
        raise ValueError(f"taps: got {found}, takes counts of the target's layers, 0 .. {layers}")
    return found
