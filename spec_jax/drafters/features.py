"""What drafters that read the target's hidden states share: the committed tokens' states, in the order of the text."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax.drafters.drafter import Committed


def required(features: Array | None) -> Array:
    """The target's features [B, N, taps, hidden]. Raises ValueError where the target returns none."""
    if features is None:
        raise ValueError("target: got one without taps, takes one that returns the features that the drafter reads")
    return features


def along_path(committed: Committed, take: Callable[[Array], Array]) -> Array:
    """What the drafter's `tap` took of every committed token [B, M, ...]; `take` takes the same of prefill features.

    Entries from the block's length on are those of any token.
    """
    if committed.tree is None:
        return take(required(committed.taps))
    path = jnp.minimum(committed.path, committed.taps.shape[1] - 1)
    return jax.vmap(lambda x, at: x[at])(committed.taps, path)


def following(committed: Committed) -> Int[Array, "b m"]:
    """The token after each committed one; after the last it is the new anchor."""
    c = committed
    last = jnp.arange(c.tokens.shape[1]) == c.length[:, None] - 1
    return jnp.where(last, c.next_token[:, None], jnp.roll(c.tokens, -1, axis=1))
