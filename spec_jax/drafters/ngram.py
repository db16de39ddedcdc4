"""Prompt lookup: draft what followed the last n-gram when it came before (arXiv 2304.04487)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax import tree as trees
from spec_jax.checks import check_sizes
from spec_jax.drafters import matches
from spec_jax.drafters.drafter import Chain, Context, Stateless
from spec_jax.tree import Draft


@dataclasses.dataclass(frozen=True)
class NGram(Chain, Stateless):
    """Drafts a chain of up to k tokens from the most recent earlier occurrence of the text's last n tokens.

    The longest n from n_max down to n_min that occurs at all decides. An occurrence that reaches the end of the text
    goes on with the draft itself, so a text that repeats itself is drafted at full length.
    """

    k: int = 7
    n_max: int = 3
    n_min: int = 2

    def __post_init__(self) -> None:
        """Check the settings."""
        check_sizes(self, k=1, n_max=1, n_min=1)
        if self.n_min > self.n_max:
            raise ValueError(f"n_min: got {self.n_min}, takes at most n_max, which is {self.n_max}")

    def propose(self, params: Any, state: tuple[()], context: Context) -> tuple[Draft, tuple[()]]:
        """The chain; empty where no n-gram matches."""
        tokens, length, matched = jax.vmap(self._row)(context.tokens, context.length, context.room)
        tree = jax.vmap(trees.chain)(context.anchor, tokens, jnp.where(context.active, length, 0))
        likely = matched / (matched + 1.0)
        confidence = jnp.broadcast_to(likely[:, None], tree.tokens.shape).at[:, 0].set(1.0)
        return Draft(tree, confidence), state

    def _row(self, tokens: Int[Array, "text"], length: Array, room: Array) -> tuple[Array, Array, Array]:
        """Drafted tokens, how many of them count, and how many tokens matched."""
        place = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        found = matches.match_lengths(tokens, matches.suffix(tokens, length, self.n_max))
        found = jnp.where((place < length - 1) & (found >= self.n_min), found, 0)
        best = jnp.max(found)
        at = jnp.max(jnp.where(found == best, place, 0))
        drafted = matches.continuation(tokens, length, at, self.k)
        return drafted, jnp.where(best > 0, jnp.clip(room - 1, 0, self.k), 0), best
