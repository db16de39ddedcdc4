"""Two drafters side by side, whose drafts of a row become one tree."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

from jaxtyping import Array, Int

from spec_jax.drafters.drafter import Committed, Drafter
from spec_jax.models.target import Output


class Pair(abc.ABC):
    """What joined drafters share: both sources' states as a tuple, and both told everything that is committed.

    The parameters are given to both; at most one of them takes any.
    """

    @property
    @abc.abstractmethod
    def sources(self) -> tuple[Drafter, Drafter]:
        """Both drafters."""

    def init(self, params: Any, batch: int, max_len: int) -> tuple[Any, ...]:
        """Both states, empty."""
        return tuple(source.init(params, batch, max_len) for source in self.sources)

    def tap(self, output: Output) -> tuple[Any, ...]:
        """What each of them keeps."""
        return tuple(source.tap(output) for source in self.sources)

    def observe(self, params: Any, state: tuple[Any, ...], committed: Committed) -> tuple[Any, ...]:
        """Both states after a block was committed."""
        taps = (committed.taps,) * 2 if committed.tree is None else committed.taps
        seen = [dataclasses.replace(committed, taps=own) for own in taps]
        return tuple(d.observe(params, s, c) for d, s, c in zip(self.sources, state, seen, strict=True))

    def insert(self, state: tuple[Any, ...], rows: Int[Array, "r"], other: tuple[Any, ...]) -> tuple[Any, ...]:
        """Rows replaced in both states."""
        return tuple(d.insert(s, rows, o) for d, s, o in zip(self.sources, state, other, strict=True))

    def release(
        self, state: tuple[Any, ...], rows: Int[Array, "r"], tokens: Int[Array, "r text"], length: Int[Array, "r"]
    ) -> tuple[Any, ...]:
        """Rows emptied in both states."""
        return tuple(d.release(s, rows, tokens, length) for d, s in zip(self.sources, state, strict=True))
