"""What a node may see in the tree, and how rows that hold no number are kept from those that don't see them."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def depth(mask: Bool[Array, "b n m"]) -> Int[Array, "b n"]:
    """How many ancestors each node has; its text position is the row's length plus this."""
    return jnp.maximum(mask.sum(-1, dtype=jnp.int32) - 1, 0)


def narrow(mask: Bool[Array, "b n m"], length: Int[Array, "b"], window: int | None, sinks: int) -> Bool[Array, "b n m"]:
    """The ancestors within a sliding window of `window` positions, or at one of the first `sinks` text positions.

    A node's ancestors stand in the order of their depth, so an ancestor's distance is the number of marks behind it.
    """
    if window is None:
        return mask
    upto = jnp.cumsum(mask, axis=-1, dtype=jnp.int32)
    position = length[:, None, None] + upto - 1
    return mask & ((upto[..., -1:] - upto < window) | (position < sinks))


def shield(
    tree_k: Float[Array, "b kv m d"], tree_v: Float[Array, "b kv m d"]
) -> tuple[Float[Array, "b kv m d"], Float[Array, "b kv m d"]]:
    """The staged rows with a NaN or an infinity in a value moved to its key.

    A weight of 0 times NaN is NaN, so a value reaches even nodes that don't see it; a key's logit is masked.
    """
    bad = ~jnp.isfinite(tree_v).all(-1, keepdims=True)
    return jnp.where(bad, jnp.nan, tree_k), jnp.where(bad, 0, tree_v)
