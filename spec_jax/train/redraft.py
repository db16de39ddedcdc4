"""Draft, verify, draft in one training step: blocks behind the places where the drafts of other blocks were rejected.

For drafters that read what a rejected draft leaves (`drafters.block.carry`). The first blocks stand behind the anchors
and leave what they would leave while decoding: their drafts are compared with the text, which stands for the target's
choice (it is, where the target wrote it with the engine's own noise), and one target pass over text and drafts gives
its hidden states of the rejected tokens. The second blocks stand behind the token that took a rejected one's place; all
of them are asked at once. Our reading of Carryover Drafting's parallel draft-verify-draft training, whose abstract
gives no more; what is carried over has no gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from spec_jax.drafters.block import carry
from spec_jax.drafters.block.config import BlockConfig
from spec_jax.models.target import Target
from spec_jax.train import anchors as anchoring
from spec_jax.train import branches
from spec_jax.train.slots import Said


def ask(
    asked: Any,
    said: Said,
    scored: Bool[Array, "b r k"],
    mask: Bool[Array, "b t"],
    target: Target,
    config: BlockConfig,
    kept: Array | None = None,
) -> tuple[Any, Bool[Array, "b r k"]]:
    """What a drafter is asked behind its first drafts, an `Asked`, and which of those slots count.

    Args:
        asked: what it was asked first.
        said: what it said there. A head that reads the tokens before a slot read the text's; so the tokens behind the
            first rejected one are what it would have drafted on the text.
        scored: which of the first blocks' slots count.
        mask: which tokens of the texts the loss counts.
        target: with the taps of `asked.features`.
        config: the drafter's.
        kept: the target's ids of a reduced vocabulary.
    """
    (b, r, k), t = asked.blocks.shape, asked.tokens.shape[1]
    drafted = jnp.argmax(lax.stop_gradient(said.logits), -1).astype(jnp.int32)
    drafted = drafted if kept is None else kept[drafted]
    right = jnp.cumprod((drafted == asked.blocks) & scored, axis=-1).sum(-1)
    whole = right == k
    length = jnp.where(asked.real, right + 1, 0)
    grown = branches.read(target, asked.target, asked.tokens, asked.anchors, jnp.pad(drafted, ((0, 0), (0, 0), (0, 1))))
    assert grown.features is not None
    flat = lambda x: x.reshape(b * r, *x.shape[2:])  # noqa: E731
    rows = None
    if config.rejected == "retrace":
        assert said.rows is not None
        rows = flat(lax.stop_gradient(said.rows))
    depth = jnp.broadcast_to(jnp.arange(k + 1), (b * r, k + 1))
    seen = lax.stop_gradient(flat(grown.features).astype(asked.features.dtype))
    left = carry.carried(config.block_size, seen, depth, jnp.ones(depth.shape, bool), flat(length), rows)
    places = asked.anchors + length
    real = asked.real & ~whole & (places < t)
    places = jnp.where(real, places, 0)
    label = jax.vmap(functools.partial(anchoring.labels, slots=k))
    blocks, counts = label(asked.tokens, mask, places, real)
    return dataclasses.replace(asked, anchors=places, real=real, blocks=blocks, carried=left), counts
