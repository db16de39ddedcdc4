"""Candidate continuations merged into one draft tree, the likeliest nodes first."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from spec_jax.tree import Tree

_POWER, _DOUBT = 1.5, 5.0


def merge(
    anchor: Int[Array, ""], tokens: Int[Array, "c d"], matched: Int[Array, "c"], nodes: int
) -> tuple[Tree, Float[Array, "n"]]:
    """The tree of the candidates' likeliest prefixes, and each node's confidence.

    A candidate ends at its first token below 0; a candidate with matched 0 is none. Candidates that agree share
    nodes. A candidate that matched m tokens of the text weighs (m + d)^1.5 at depth d, where it has matched d more; a
    node's confidence is its weight over 5 plus that of all continuations of its parent. Both constants are the
    fastest of some ten pairs, in a replay of SmolLM2's answers to 40 prompts.

    The nodes stand in order of the product of confidences on their root path, so every prefix of the tree is the
    likeliest tree of its size. Behind the last candidate's node come invalid ones.
    """
    c, d = tokens.shape
    alive = jnp.cumprod((tokens >= 0) & (matched > 0)[:, None], axis=1).astype(bool)
    same = jnp.cumprod(tokens[:, None] == tokens[None], axis=2).astype(bool) & alive[:, None] & alive[None]
    alike = jnp.concatenate([jnp.ones((c, c, 1), bool), same[:, :, :-1]], axis=2)
    weight = jnp.where(alive, (matched[:, None] + jnp.arange(d)).astype(jnp.float32) ** _POWER, 0.0)
    over = lambda among: (among * weight[:, None]).sum(0)  # noqa: E731
    confidence = jnp.where(alive, over(same) / (over(alike) + _DOUBT), 0.0)
    chance = jnp.cumprod(confidence, axis=1)
    speaker = jnp.argmax(same, axis=0)
    own = alive & (speaker == jnp.arange(c)[:, None])
    return _select(anchor, tokens, confidence, jnp.where(own, chance, -1.0), speaker, nodes)


def _select(
    anchor: Array, tokens: Array, confidence: Array, chance: Array, speaker: Array, nodes: int
) -> tuple[Tree, Array]:
    """The nodes of greatest chance (-1: no node). Node (i, d) hangs below the candidate that speaks for i at d - 1."""
    c, d = tokens.shape
    take = min(nodes - 1, c * d)
    top, pick = lax.top_k(chance.reshape(-1), take)
    valid = top >= 0
    index = jnp.zeros(c * d, jnp.int32).at[pick].set(jnp.arange(1, take + 1, dtype=jnp.int32))
    above = jnp.concatenate([jnp.full((c, 1), -1), speaker[:, :-1] * d + jnp.arange(d - 1)], axis=1).reshape(-1)[pick]
    parent = jnp.where(valid & (above >= 0), index[jnp.maximum(above, 0)], 0)
    pad = lambda x, first: jnp.pad(jnp.concatenate([first[None].astype(x.dtype), x]), (0, nodes - 1 - take))  # noqa: E731
    tree = Tree(
        tokens=pad(jnp.where(valid, tokens.reshape(-1)[pick], 0).astype(jnp.int32), anchor),
        parent=pad(parent, jnp.int32(-1)),
        valid=pad(valid, jnp.bool_(True)),
    )
    return tree, pad(jnp.where(valid, confidence.reshape(-1)[pick], 0.0), jnp.float32(1.0))
