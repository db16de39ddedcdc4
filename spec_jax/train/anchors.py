"""Where in a text a drafter is trained: random anchors, as many in every text, and what blocks behind them may see."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def random_anchors(
    key: Array, mask: Bool[Array, "t"], count: int, prompt_end: bool = True
) -> tuple[Int[Array, "count"], Bool[Array, "count"]]:
    """Positions drawn without repeats from those whose block has a label, in ascending order, and which are real.

    A position counts if the loss counts it and the next one (DFlash, arXiv 2602.06036). Unused anchors stand behind the
    others, as 0.

    Args:
        key: a typed key; another one per text and epoch.
        mask: which tokens the loss counts.
        count: how many anchors.
        prompt_end: take the token before the first counted one too: our engine's first draft has it as its anchor.
    """
    t = mask.shape[0]
    next_counts = jnp.concatenate([mask[1:], jnp.zeros(1, bool)])
    fits = next_counts if prompt_end else mask & next_counts
    luck = jnp.where(fits, jax.random.uniform(key, (t,)), 2.0)
    picked = jnp.argsort(luck)[: min(count, t)]
    found = jnp.sort(jnp.where(fits[picked], picked, t))
    found = jnp.pad(found, (0, count - found.shape[0]), constant_values=t)
    return jnp.where(found < t, found, 0).astype(jnp.int32), found < t


def labels(
    tokens: Int[Array, "t"],
    mask: Bool[Array, "t"],
    anchors: Int[Array, "r"],
    real: Bool[Array, "r"],
    slots: int,
) -> tuple[Int[Array, "r k"], Bool[Array, "r k"]]:
    """The tokens at anchor + 1 .. anchor + slots, and which of them count: those of the text that the loss counts."""
    at = anchors[:, None] + 1 + jnp.arange(slots)
    inside = at < tokens.shape[0]
    at = jnp.minimum(at, tokens.shape[0] - 1)
    return tokens[at], mask[at] & inside & real[:, None]


def sees_context(
    query: Int[Array, "..."], anchor: Int[Array, "..."], key: Int[Array, "..."], window: int | None = None
) -> Bool[Array, "..."]:
    """Whether a block row at position `query` sees the context's feature at position `key`; all broadcast.

    It sees those strictly before its block's anchor: when it drafts, the anchor has not been through the target. With a
    sliding window only the last window - 1 positions before its own.
    """
    seen = key < anchor
    return seen if window is None else seen & (query - key < window)


def sees_row(
    query: Int[Array, "..."],
    key: Int[Array, "..."],
    same_block: Bool[Array, "..."],
    causal: bool,
    window: int | None = None,
) -> Bool[Array, "..."]:
    """Whether a block row at position `query` sees a block row at position `key`: those of its own block.

    Causal layers see those up to themselves; a window is one on either side otherwise.
    """
    seen = same_block & (key <= query) if causal else same_block
    return seen if window is None else seen & (jnp.abs(query - key) < window)


def block_mask(
    anchors: Int[Array, "r"],
    real: Bool[Array, "r"],
    rows: int,
    context: int,
    causal: bool = False,
    window: int | None = None,
) -> Bool[Array, "q m"]:
    """DFlash's sparse training mask: R blocks of `rows` rows against `context` features and all block rows.

    Query b * rows + i is row i of block b, at position anchor_b + i; keys are the context's positions, then the block
    rows in the same order. Rows of an unused anchor see their own block alone, so that no row sees nothing.
    """
    block = jnp.repeat(jnp.arange(anchors.shape[0]), rows)
    start = jnp.repeat(anchors, rows)
    position = start + jnp.tile(jnp.arange(rows), anchors.shape[0])
    at = jnp.arange(context)
    outer = sees_context(position[:, None], start[:, None], at[None], window) & jnp.repeat(real, rows)[:, None]
    inner = sees_row(position[:, None], position[None], block[:, None] == block[None], causal, window)
    return jnp.concatenate([outer, inner], axis=1)
