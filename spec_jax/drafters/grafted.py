"""Graft: a draft tree pruned to its likeliest nodes, the room filled with retrieved continuations."""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Int

from spec_jax.drafters.merged import Merged
from spec_jax.topology.merge import graft
from spec_jax.tree import Draft


@dataclasses.dataclass(frozen=True)
class Grafted(Merged):
    """Drafts the Token Recycling tree, pruned, with the Suffix drafter's continuations grafted on it.

    Source: Graft, arXiv 2605.20104, whose trees are EAGLE-3's; `topology.merge.graft` takes any.

    Attributes:
        keep: nodes that are left of the tree, the anchor among them.
    """

    keep: int = 24

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        if not isinstance(self.keep, int) or isinstance(self.keep, bool) or not 1 <= self.keep <= self.nodes:
            raise ValueError(f"keep: got {self.keep!r}, takes an integer of 1 .. nodes, which is {self.nodes}")

    def join(self, table: Draft, match: Draft, following: Int[Array, "n k"], room: Int[Array, ""]) -> Draft:
        """The grafted tree of a row."""
        return graft(table, match, self.keep, self.nodes)
