"""Blocks behind many anchors of whole texts at once, differentiable: what training needs."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax.drafters.block.carry import Carried
from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.expander import teacher_logits
from spec_jax.drafters.block.heads.head import PLAIN, Block, Head, Plain
from spec_jax.drafters.block.network import BlockParams, base_logits, draft_text, slot_inputs
from spec_jax.models.norms import rms_norm


@flax.struct.dataclass
class TextBlocks:
    """What the blocks behind [b, a] anchors of [b, t] texts predict, and what they should.

    logits are the head's, given the true tokens before each; base the network's own. labels[..., i] is the token i + 1
    places behind the anchor; known says whether the text reaches that far. block holds all b * a blocks, row by row.
    """

    logits: Float[Array, "b a d draft_vocab"]
    base: Float[Array, "b a d draft_vocab"]
    labels: Int[Array, "b a d"]
    known: Bool[Array, "b a d"]
    block: Block


def text_blocks(
    config: BlockConfig,
    params: BlockParams,
    features: Float[Array, "b t taps hidden"],
    tokens: Int[Array, "b t"],
    anchors: Int[Array, "b a"],
    head: Head = PLAIN,
    carried: Carried | None = None,
) -> TextBlocks:
    """Run the blocks behind `anchors`, text positions 0 .. t - 1, each over the features of the positions before it.

    A slot of a block sees its own block and positions strictly below its anchor; the anchor's own feature is unseen, as
    it is while decoding. features are those of `config.taps`, and the target's last hidden state behind them if the
    head reads it. Labels are in the target's vocabulary. carried is what the blocks before those, b * a of them, left.
    """
    b, t = tokens.shape
    a = anchors.shape[1]
    pick = lambda at: jnp.take_along_axis(tokens, jnp.clip(at, 0, t - 1).reshape(b, -1), axis=1)  # noqa: E731
    anchor = pick(anchors)
    inputs = slot_inputs(config, params.ends, anchor).astype(params.network.norm.dtype)
    hidden = draft_text(config, params.network, inputs, features[:, :, : len(config.taps)], anchors, carried)
    place = anchors[:, :, None] + jnp.arange(config.depth + 1)
    path = pick(place).reshape(b, a, -1)
    before = jnp.where(anchors > 0, pick(anchors - 1), anchor)
    last = jnp.take_along_axis(features, jnp.maximum(anchors - 1, 0)[:, :, None, None], axis=1)
    last = jnp.where((anchors > 0)[:, :, None, None], last, 0)
    flat = lambda x: x.reshape(b * a, *x.shape[2:])  # noqa: E731
    block = make_block(config, params, head, flat(anchor), flat(before), flat(last), flat(hidden))
    logits = block.logits
    if not isinstance(head, Plain):
        logits = teacher_logits(head, params, block, flat(path[:, :, :-1]))
    split = lambda x: x.reshape(b, a, *x.shape[1:])  # noqa: E731
    return TextBlocks(split(logits), split(block.logits), path[:, :, 1:], place[:, :, 1:] < t, block)


def make_block(
    config: BlockConfig,
    params: BlockParams,
    head: Head,
    anchor: Int[Array, "b"],
    previous: Int[Array, "b"],
    feature: Float[Array, "b taps hidden"],
    hidden: Float[Array, "b s hidden"],
) -> Block:
    """A block from the network's last rows: its norm, its logits, and what the head computes once."""
    normed = rms_norm(hidden, params.network.norm, config.rms_norm_eps)
    logits = base_logits(config, params, normed[:, config.first_slot :])
    block = Block(anchor, previous, feature, hidden, normed, logits, config)
    return dataclasses.replace(block, prepared=head.prepare(params, block))
