"""Blocks inside the target's rollouts: IRA (arXiv 2609.38795)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from spec_jax.train import branches
from spec_jax.train.branches import Branches


def ask(
    asked: Any, grown: Branches, key: Array, eos: tuple[int, ...]
) -> tuple[Any, Float[Array, "b s k vocab"], Bool[Array, "b s k"]]:
    """What a drafter is asked inside a rollout of every text: an `Asked`, the target's logits, and which slots count.

    The rollout is that of a real anchor, drawn by the key; the text goes on with it, and s = K - 2 blocks stand behind
    its tokens 2 .. K - 1. Slots beyond the rollout, or behind its end, do not count.
    """
    b, _, k = grown.tokens.shape
    chance = jnp.where(asked.real, jax.random.uniform(key, asked.real.shape), -1.0)
    parent = jnp.argmax(chance, axis=1)[:, None]
    tokens, found = branches.spliced(asked.tokens, asked.features, asked.anchors, grown, parent)
    offset = jnp.broadcast_to(jnp.arange(2, k), (b, k - 2))
    real = jnp.broadcast_to(jnp.take_along_axis(asked.real, parent, axis=1), offset.shape)
    where = (jnp.broadcast_to(parent, offset.shape), offset, real)
    blocks, law, inside = branches.secondary(grown, *where)
    living = branches.alive(grown.tokens, eos).astype(jnp.int32)
    alive, _, _ = branches.secondary(dataclasses.replace(grown, tokens=living), *where)
    new = dataclasses.replace(
        asked,
        tokens=tokens[:, 0],
        features=lax.stop_gradient(found[:, 0]),
        anchors=jnp.take_along_axis(asked.anchors, parent, axis=1) + offset,
        real=real,
        blocks=blocks,
    )
    return new, law, inside & (alive > 0)
