"""A ring of n-grams per row, each kept once, the latest ones found first by their first token."""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from spec_jax.drafters.matches import NO_TOKEN


@flax.struct.dataclass
class NGrams:
    """n-grams of one row (or [B, P, N] of a batch), unused ones NO_TOKEN throughout; `head` is the next slot."""

    tokens: Int[Array, "*b p n"]
    head: Int[Array, "*b"]


def empty(batch: int, size: int, n: int) -> NGrams:
    """No n-grams in any row."""
    return NGrams(jnp.full((batch, size, n), NO_TOKEN, jnp.int32), jnp.zeros(batch, jnp.int32))


def add(ngrams: NGrams, new: Int[Array, "w n"], known: Bool[Array, "w"]) -> NGrams:
    """One row's ring with the known ones of `new` over its oldest; an n-gram that is there already becomes the latest.

    The ring must hold at least as many as are added.
    """
    size, w = ngrams.tokens.shape[0], new.shape[0]
    order = jnp.arange(w)
    again = (new[:, None] == new[None]).all(-1) & known & (order[:, None] < order)
    kept = known & ~again.any(1)
    old = ((ngrams.tokens[:, None] == new[None]).all(-1) & kept).any(1)
    tokens = jnp.where(old[:, None], NO_TOKEN, ngrams.tokens)
    count = jnp.cumsum(kept, dtype=jnp.int32)
    slot = jnp.where(kept, (ngrams.head + count - 1) % size, size)
    return NGrams(tokens.at[slot].set(new, mode="drop"), (ngrams.head + count[-1]) % size)


def starting_with(ngrams: NGrams, token: Int[Array, ""], count: int) -> Int[Array, "count n"]:
    """One row's latest n-grams that start with a token, the latest first; NO_TOKEN where there are no more."""
    size = ngrams.tokens.shape[0]
    age = (ngrams.head - 1 - jnp.arange(size, dtype=jnp.int32)) % size
    fresh = jnp.where(ngrams.tokens[:, 0] == token, size - age, 0)
    found, at = lax.top_k(fresh, count)
    return jnp.where((found > 0)[:, None], ngrams.tokens[at], NO_TOKEN)
