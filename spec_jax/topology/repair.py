"""CURE: a block draft's chain, with short repair branches where it is least sure of its token."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from spec_jax.topology.compact import LEAST
from spec_jax.topology.pool import Pool, best
from spec_jax.tree import Draft


def repair_tree(
    anchor: Int[Array, ""],
    ids: Int[Array, "d k"],
    chance: Float[Array, "d k"],
    repairs: int,
    length: int,
    margin: float = 1.0,
) -> Draft:
    """A chain of the likeliest tokens, and at its most fragile positions a branch with the runner-up ("point").

    Fragile are the `repairs` positions with the smallest margin, the likeliest token's chance less the runner-up's, of
    those below `margin`. A branch goes on with the block's likeliest tokens of the next positions and ends after
    `length` tokens. 1 + d + repairs x length nodes, likeliest first.

    Args:
        anchor: the root's token.
        ids: tokens of each position of the block, likeliest first; k is at least 2.
        chance: their chances.
        repairs: most positions that are repaired.
        length: most tokens of a branch.
        margin: positions at least as sure as this are not repaired.

    Source: CURE, after its abstract alone: how it scores margins and bounds paths is our reading. Its realignment of
    the drafter's state after the verdict is the drafter's `observe`.

    Raises:
        ValueError: for more repairs than positions, fewer than 2 tokens a position, or a length below 1.
    """
    depth, ranks = ids.shape
    if not 0 <= repairs <= depth or ranks < 2 or length < 1:
        raise ValueError(
            f"repairs: got {repairs} of {length} tokens for {depth} positions of {ranks}, takes 0 .. {depth} of at "
            "least 1 for positions of at least 2"
        )
    log = jnp.log(jnp.clip(chance, LEAST, 1.0))
    path = jnp.cumsum(log[:, 0])
    sure = chance[:, 0] - chance[:, 1]
    margins, at = lax.top_k(-jnp.where(sure < margin, sure, jnp.inf), repairs)
    step = jnp.arange(length)
    place = at[:, None] + step
    inside = (place < depth) & (margins > -jnp.inf)[:, None]
    place = jnp.minimum(place, depth - 1)
    rank = jnp.where(step == 0, 1, 0)
    before = jnp.where(at > 0, path[jnp.maximum(at - 1, 0)], 0.0)
    branch = jnp.where(inside, before[:, None] + jnp.cumsum(log[place, rank], axis=1), -jnp.inf)
    first = depth + length * jnp.arange(repairs)[:, None]
    above = jnp.where(step == 0, at[:, None] - 1, first + step - 1)
    pool = Pool(
        tokens=jnp.concatenate([ids[:, 0], ids[place, rank].reshape(-1)]),
        parent=jnp.concatenate([jnp.arange(depth) - 1, above.reshape(-1)]),
        log_chance=jnp.concatenate([path, branch.reshape(-1)]),
    )
    return best(pool, anchor, 1 + depth + repairs * length)
