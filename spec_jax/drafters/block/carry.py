"""What a verdict leaves for the next block: the rejected part of the last draft, as far as its places come again.

Two published ways to use it, both known from their abstracts alone; what those leave open is our reading.

Carryover Drafting: the target's hidden states of rejected positions, which the verdict's pass computed anyway, are
further context of the next block, with a learned vector added that tells them from committed ones. They are replaced
every round and never reach the cache of committed tokens. Here they stand at their own text positions, and all rows of
the block see them.

ReTrace: the network's own last rows of the rejected positions, aligned with the next block's slots by text position
and corrected with the target's hidden states there, are added to the block's embedded slots through a gate.

A text position from the new anchor's on counts as rejected if the draft that was verified had a node there. Of a tree
that is the first such node, in the draft's order. So a draft that was accepted as a whole leaves nothing, and neither
does a part that was drafted but not verified.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax.drafters.block.ends import apply
from spec_jax.models.linear import Dense

Kind = Literal["carryover", "retrace"]
KINDS = ("carryover", "retrace")


@flax.struct.dataclass
class Carried:
    """Rejected places by the slots of the next block, the first of which is its anchor's.

    features are the target's tapped hidden states there; hidden are the network's normed rows (ReTrace; None else);
    valid says which slots have any. What is not valid is zero.
    """

    features: Float[Array, "b s taps hidden"]
    hidden: Float[Array, "b s hidden"] | None
    valid: Bool[Array, "b s"]


@flax.struct.dataclass
class Retrace:
    """ReTrace's maps: the correction by the target's features, the gate [x; h] -> hidden, and the way to the input."""

    correction: Dense
    gate: Dense
    into: Dense


def nothing(kind: Kind, batch: int, slots: int, taps: int, hidden: int, dtype: Any) -> Carried:
    """No rejected places."""
    own = jnp.zeros((batch, slots, hidden), dtype) if kind == "retrace" else None
    return Carried(jnp.zeros((batch, slots, taps, hidden), dtype), own, jnp.zeros((batch, slots), bool))


def carried(
    slots: int,
    features: Float[Array, "b n taps hidden"],
    depth: Int[Array, "b n"],
    verified: Bool[Array, "b n"],
    length: Int[Array, "b"],
    hidden: Float[Array, "b s hidden"] | None = None,
) -> Carried:
    """What a verdict leaves for the next block of `slots` slots.

    Args:
        slots: s.
        features: the target's of all n nodes.
        depth: of the nodes; the root, which was the last block's anchor, has 0.
        verified: which nodes are there.
        length: how many nodes of the path were committed, the root among them; 0 leaves nothing.
        hidden: the last block's normed rows.
    """
    want = length[:, None] + jnp.arange(slots)
    there = verified[:, None] & (depth[:, None] == want[..., None]) & (length > 0)[:, None, None]
    valid, node = there.any(-1), jnp.argmax(there, axis=-1)
    if hidden is not None:
        valid &= want < hidden.shape[1]
        at = jnp.minimum(want, hidden.shape[1] - 1)
        hidden = jnp.where(valid[..., None], jnp.take_along_axis(hidden, at[..., None], axis=1), 0)
    found = jax.vmap(lambda x, at: x[at])(features, node)
    return Carried(jnp.where(valid[..., None, None], found, 0), hidden, valid)


def retraced(
    maps: Retrace, inputs: Float[Array, "*b s hidden"], seen: Float[Array, "*b s hidden"], kept: Carried
) -> Float[Array, "*b s hidden"]:
    """The embedded slots with the rejected rows added: x + sigmoid(gate [x; r]) * into r, r = h + correction c.

    seen (c) are the kept features, joined and projected as the context's are.
    """
    assert kept.hidden is not None
    rows = kept.hidden + apply(maps.correction, seen)
    gate = jax.nn.sigmoid(apply(maps.gate, jnp.concatenate([inputs, rows], axis=-1)))
    return inputs + jnp.where(kept.valid[..., None], gate * apply(maps.into, rows), 0).astype(inputs.dtype)


def init_retrace(hidden: int, key: Array, dtype: Any, scale: float) -> Retrace:
    """Random maps, of which the last is zero: the network begins as one that carries nothing over."""
    a, b = jax.random.split(key)
    draw = lambda key, into: Dense((scale * jax.random.normal(key, (into, hidden))).astype(dtype))  # noqa: E731
    gate = dataclasses.replace(draw(b, 2 * hidden), bias=jnp.zeros(hidden, dtype))
    return Retrace(draw(a, hidden), gate, Dense(jnp.zeros((hidden, hidden), dtype)))
