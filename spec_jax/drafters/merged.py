"""Two retrieval drafters as one: their states side by side, their drafts of a row joined into one tree."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax.drafters.drafter import Committed, Context
from spec_jax.drafters.recycling import Recycling
from spec_jax.drafters.suffix import Suffix
from spec_jax.models.target import Output
from spec_jax.tree import Draft


@dataclasses.dataclass(frozen=True)
class Merged(abc.ABC):
    """A Token Recycling drafter and a Suffix drafter; subclasses say how their drafts become one.

    Neither looks at node indices of its own draft after the verdict, which is why their drafts can be mixed.

    Attributes:
        recycling: the source of the likeliest successors.
        suffix: the source of continuations of the longest match.
        nodes: nodes of the joined draft, the anchor among them.
    """

    recycling: Recycling
    suffix: Suffix = Suffix()
    nodes: int = 32

    def __post_init__(self) -> None:
        """Check the settings."""
        if not isinstance(self.nodes, int) or isinstance(self.nodes, bool) or self.nodes < 2:
            raise ValueError(f"nodes: got {self.nodes!r}, takes an integer of at least 2")

    @abc.abstractmethod
    def join(self, table: Draft, match: Draft, following: Int[Array, "n k"], room: Int[Array, ""]) -> Draft:
        """One row's draft from both; following are the successors of match's nodes, room the tokens still to come."""

    @property
    def depth(self) -> int:
        """That of the deeper source, and a successor behind it."""
        return min(self.nodes - 1, max(self.recycling.depth, self.suffix.depth + 1))

    @property
    def vocab_size(self) -> int:
        """The table's."""
        return self.recycling.vocab_size

    def init(self, params: Any, batch: int, max_len: int) -> tuple[Any, Any]:
        """Both states, empty."""
        return self.recycling.init(params, batch, max_len), self.suffix.init(params, batch, max_len)

    def tap(self, output: Output) -> Any:
        """What the table keeps."""
        return self.recycling.tap(output)

    def observe(self, params: Any, state: tuple[Any, Any], committed: Committed) -> tuple[Any, Any]:
        """Both states after a block was committed."""
        table, match = state
        return self.recycling.observe(params, table, committed), self.suffix.observe(params, match, committed)

    def propose(self, params: Any, state: tuple[Any, Any], context: Context) -> tuple[Draft, tuple[Any, Any]]:
        """The joined drafts."""
        table, one = self.recycling.propose(params, state[0], context)
        match, two = self.suffix.propose(params, state[1], context)
        following = jnp.where(match.tree.valid[..., None], one.successors[match.tree.tokens], -1)
        room = jnp.where(context.active, context.room, 0)
        return jax.vmap(self.join)(table, match, following, room), (one, two)

    def insert(self, state: tuple[Any, Any], rows: Int[Array, "r"], other: tuple[Any, Any]) -> tuple[Any, Any]:
        """Rows replaced in both states."""
        return self.recycling.insert(state[0], rows, other[0]), self.suffix.insert(state[1], rows, other[1])

    def release(
        self, state: tuple[Any, Any], rows: Int[Array, "r"], tokens: Int[Array, "r text"], length: Int[Array, "r"]
    ) -> tuple[Any, Any]:
        """Rows emptied in both states."""
        table, match = state
        return (
            self.recycling.release(table, rows, tokens, length),
            self.suffix.release(match, rows, tokens, length),
        )
