"""What drafters made of several share: each of them is told what the whole is told."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, TypeVar

import flax.struct
from jaxtyping import Array, Int

from spec_jax.drafters.drafter import Committed, Drafter, memory_of
from spec_jax.models.target import Output


@flax.struct.dataclass
class States:
    """The members' states; subclasses keep something of their own beside them."""

    states: tuple[Any, ...]


S = TypeVar("S", bound=States)


class Several(abc.ABC):
    """A drafter of `members`, which passes on to each of them all but what is committed and proposed."""

    @property
    @abc.abstractmethod
    def members(self) -> tuple[Drafter, ...]:
        """The drafters."""

    @property
    def memory(self) -> int:
        """Remembered tokens a row of those that remember any. Raises ValueError where they differ in it."""
        sizes = {memory_of(d) for d in self.members} - {0}
        if len(sizes) > 1:
            raise ValueError(f"memory: got drafters that remember {sorted(sizes)} tokens a row, takes equal numbers")
        return max(sizes, default=0)

    def recall(self, state: S, memory: Int[Array, "b m"]) -> S:
        """The state in which those that remember anything know what is remembered of each row's prompt."""
        each = zip(self.members, state.states, strict=True)
        told = tuple(d.recall(s, memory) if memory_of(d) else s for d, s in each)  # type: ignore[attr-defined]
        return dataclasses.replace(state, states=told)

    def tap(self, output: Output) -> tuple[Any, ...]:
        """What each of them keeps."""
        return tuple(d.tap(output) for d in self.members)

    def insert(self, state: S, rows: Int[Array, "r"], other: S) -> S:
        """Rows replaced in all of their states."""
        each = zip(self.members, state.states, other.states, strict=True)
        return dataclasses.replace(state, states=tuple(d.insert(s, rows, o) for d, s, o in each))

    def release(self, state: S, rows: Int[Array, "r"], tokens: Int[Array, "r text"], length: Int[Array, "r"]) -> S:
        """Rows emptied in all of their states."""
        each = zip(self.members, state.states, strict=True)
        return dataclasses.replace(state, states=tuple(d.release(s, rows, tokens, length) for d, s in each))


class Joined(Several):
    """Drafters whose drafts of a row become one tree. The parameters are given to all; at most one takes any."""

    def init(self, params: Any, batch: int, max_len: int) -> States:
        """All states, empty."""
        return States(tuple(d.init(params, batch, max_len) for d in self.members))

    def observe(self, params: Any, state: Any, committed: Committed) -> Any:
        """All states after a block was committed."""
        taps = (committed.taps,) * len(self.members) if committed.tree is None else committed.taps
        seen = [dataclasses.replace(committed, taps=own) for own in taps]
        each = zip(self.members, state.states, seen, strict=True)
        return dataclasses.replace(state, states=tuple(d.observe(params, s, c) for d, s, c in each))
