"""A drafter that follows a script: known text with planted errors that force any accepted count, for audits."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax.drafters.drafter import Chain, Context, Stateless
from spec_jax.tree import Draft, Tree


@flax.struct.dataclass
class Script:
    """text[b] is the text that the row is expected to have; at position t, right[b, t] right tokens are drafted.

    The token after them is wrong (the right one plus one, modulo the vocabulary), so that a target whose text is `text`
    accepts exactly min(right, k) tokens in a round whose first drafted position is t.
    """

    text: Int[Array, "b text"]
    right: Int[Array, "b text"]


@dataclasses.dataclass(frozen=True)
class Scripted(Chain, Stateless):
    """Drafts k tokens from a Script given as its parameters."""

    k: int
    vocab: int

    def propose(self, params: Script, state: tuple[()], context: Context) -> tuple[Draft, Any]:
        """The script's tokens behind each row's text, with its planted error."""
        at = context.length[:, None] + jnp.arange(self.k)
        size = params.text.shape[1]
        tokens = jnp.take_along_axis(params.text, jnp.minimum(at, size - 1), axis=1)
        right = jax.vmap(lambda r, i: r[jnp.minimum(i, size - 1)])(params.right, context.length)
        wrong = jnp.arange(self.k) >= right[:, None]
        tokens = jnp.where(wrong, (tokens + 1) % self.vocab, tokens)
        tokens = jnp.concatenate([context.anchor[:, None], tokens], axis=1)
        parent = jnp.broadcast_to(jnp.arange(-1, self.k), tokens.shape)
        return Draft(Tree(tokens, parent, jnp.ones(tokens.shape, bool)), jnp.ones(tokens.shape)), state
