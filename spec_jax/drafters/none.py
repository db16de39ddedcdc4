"""No drafter: a draft that is the anchor alone, so that a round is a plain decoding step."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from spec_jax.drafters.drafter import Context, Stateless
from spec_jax.tree import Draft, Tree


@dataclasses.dataclass(frozen=True)
class NoDrafter(Stateless):
    """k = 0: plain decoding through the speculative code."""

    nodes: int = 1
    depth: int = 0

    def propose(self, params: Any, state: tuple[()], context: Context) -> tuple[Draft, tuple[()]]:
        """The anchor alone."""
        anchor = context.anchor[:, None]
        tree = Tree(anchor, jnp.full_like(anchor, -1), jnp.ones(anchor.shape, bool))
        return Draft(tree, jnp.ones(anchor.shape)), state
