"""GOOSE: matches in the text as a deep spine, recycled successors as branches of every spine node."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax import tree as trees
from spec_jax.drafters.merged import Merged
from spec_jax.topology.merge import discount, merge
from spec_jax.topology.spine import spine_tree
from spec_jax.tree import Draft


@dataclasses.dataclass(frozen=True)
class Goose(Merged):
    """Drafts a spine tree (after GOOSE, arXiv 2604.02047): `topology.spine` over both sources, by path chance.

    The spine is the Suffix drafter's draft. Each of its nodes has the successors of its token in the recycling table as
    further children, and the anchor has the whole Token Recycling tree; a source that is less sure counts where the
    spine is not. Without a match the draft is Token Recycling's.
    """

    def join(self, table: Draft, match: Draft, following: Int[Array, "n k"], room: Int[Array, ""]) -> Draft:
        """The spine tree of a row."""
        below = trees.depth(match.tree.parent) + 1
        following = jnp.where((below < room)[:, None], following, -1)
        rates = jnp.asarray(self.recycling.rates, jnp.float32)
        wide = spine_tree(match, following, rates, self.nodes)
        sure = jnp.where((match.tree.parent == 0) & match.tree.valid, match.confidence, 0.0).sum()
        return merge(wide, discount(table, jnp.clip(1.0 - sure, 0.0, 1.0)), self.nodes)
