"""The attention state backend: a key/value cache per layer, staged tree rows, and their commit.

Scoring a tree never writes the cache. Each node attends to the committed prefix (a length, no mask) and to its
ancestors in the tree (an N x N block); its own key and value rows are staged. Commit gathers the rows of the accepted
path and writes them behind the prefix, so there is nothing to roll back.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def commit_rows(
    cache: Float[Array, "b kv s d"], staged: Float[Array, "b kv n d"], path: Int[Array, "b m"], length: Int[Array, "b"]
) -> Float[Array, "b kv s d"]:
    """Write the staged rows along each row's path to cache slots length .. length + m - 1.

    The cache keeps m spare slots behind its longest text, so that the write never clamps; rows past the accepted part
    are overwritten by the next commit before anything reads them.
    """
    rows = jnp.take_along_axis(staged, path[:, None, :, None], axis=2).astype(cache.dtype)
    if cache.shape[0] == 1:
        return lax.dynamic_update_slice(cache, rows, (0, 0, length[0], 0))
    return jax.vmap(lambda c, r, at: lax.dynamic_update_slice(c, r, (0, at, 0)))(cache, rows, length)
