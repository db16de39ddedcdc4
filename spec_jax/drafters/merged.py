"""Two retrieval drafters as one: their drafts of a row joined into one tree."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax.checks import check_sizes
from spec_jax.drafters.drafter import Context
from spec_jax.drafters.recycling import Recycling
from spec_jax.drafters.several import Joined, States
from spec_jax.drafters.suffix import Suffix
from spec_jax.tree import Draft


@dataclasses.dataclass(frozen=True)
class Merged(Joined):
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
        check_sizes(self, nodes=2)

    @abc.abstractmethod
    def join(self, table: Draft, match: Draft, following: Int[Array, "n k"], room: Int[Array, ""]) -> Draft:
        """One row's draft from both; following are the successors of match's nodes, room the tokens still to come."""

    @property
    def members(self) -> tuple[Recycling, Suffix]:
        """Both drafters."""
        return self.recycling, self.suffix

    @property
    def depth(self) -> int:
        """That of the deeper source, and a successor behind it."""
        return min(self.nodes - 1, max(self.recycling.depth, self.suffix.depth + 1))

    @property
    def vocab_size(self) -> int:
        """The table's."""
        return self.recycling.vocab_size

    def propose(self, params: Any, state: States, context: Context) -> tuple[Draft, States]:
        """The joined drafts."""
        table, one = self.recycling.propose(params, state.states[0], context)
        match, two = self.suffix.propose(params, state.states[1], context)
        following = jnp.where(match.tree.valid[..., None], one.successors[match.tree.tokens], -1)
        room = jnp.where(context.active, context.room, 0)
        return jax.vmap(self.join)(table, match, following, room), States((one, two))
