"""CLaSp (arXiv 2505.24196): the layers whose absence changes the last token's hidden states least, found anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from spec_jax.checks import check_sizes
from spec_jax.drafters.drafter import Committed, Context
from spec_jax.drafters.skipping.drafter import check_skips, spread
from spec_jax.models import layers
from spec_jax.models.llama import Llama
from spec_jax.models.target import Output


@flax.struct.dataclass
class ClaspState:
    """Each row's hidden states of the last token in the target's state, whether it has any; the set and its age."""

    hidden: Float[Array, "b l1 hidden"]
    known: Bool[Array, "b"]
    keep: Bool[Array, "l"]
    age: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class Clasp:
    """Chooses the skipped layers by `fewest_changes` over what the last verifying pass computed.

    The programme costs what verifying skips + 1 tokens does. The target has all taps (`taps`). A batch has one set: the
    cosines are summed over its rows, where the paper has one row.

    Attributes:
        skips: how many layers are skipped.
        every: rounds that a set stays; the paper too renews it less often than every round.
    """

    skips: int
    every: int = 4

    def __post_init__(self) -> None:
        """Check the settings."""
        check_sizes(self, every=1)

    def check(self, layers: int) -> None:
        """ValueError for a model that can't lose so many layers."""
        check_skips(self.skips, layers)

    def init(self, model: Llama, params: Any, batch: int) -> ClaspState:
        """Evenly spread layers until there is something to go by."""
        count, size = model.config.num_layers, model.config.hidden_size
        hidden = jnp.zeros((batch, count + 1, size), params.embedding.dtype)
        keep = jnp.asarray(spread(count, self.skips))
        return ClaspState(hidden, jnp.zeros(batch, bool), keep, jnp.int32(0))

    def tap(self, output: Output) -> Array:
        """All hidden states. Raises ValueError for a target without them."""
        return _all(output.features)

    def observe(self, state: ClaspState, committed: Committed) -> ClaspState:
        """The hidden states of the last committed token."""
        moved = committed.length > 0
        last = jnp.take_along_axis(committed.path, jnp.maximum(committed.length - 1, 0)[:, None], axis=1)[:, 0]
        seen = jax.vmap(lambda features, node: features[node])(_all(committed.taps), last)
        hidden = jnp.where(moved[:, None, None], seen, state.hidden)
        return dataclasses.replace(state, hidden=hidden, known=state.known | moved)

    def choose(self, model: Llama, params: Any, state: ClaspState, context: Context) -> tuple[Array, ClaspState]:
        """The set, renewed if it is due."""
        weight = (state.known & context.active).astype(jnp.float32)
        due = (state.age % self.every == 0) & (weight > 0).any()
        again = lambda: fewest_changes(  # noqa: E731
            through(model, params, context.target, self.skips + 1), state.hidden, weight, self.skips
        )
        keep = lax.cond(due, again, lambda: state.keep)
        return keep, dataclasses.replace(state, keep=keep, age=jnp.where(due, 1, state.age + (state.age > 0)))

    def insert(self, state: ClaspState, rows: Int[Array, "r"], other: ClaspState) -> ClaspState:
        """Rows' hidden states replaced; the set stays that of `state`."""
        put = lambda x, y: x.at[rows].set(y, mode="drop")  # noqa: E731
        return dataclasses.replace(state, hidden=put(state.hidden, other.hidden), known=put(state.known, other.known))


def taps(target: Llama) -> Llama:
    """The target with the taps that the search reads: the embedding and every layer."""
    return dataclasses.replace(target, taps=tuple(range(target.config.num_layers + 1)))


def fewest_changes(
    layer: Callable[[int, Array], Array],
    hidden: Float[Array, "b l1 hidden"],
    weight: Float[Array, "b"],
    skips: int,
) -> Bool[Array, "l"]:
    """The layers to keep so that, with `skips` others left out, hidden states stay close to the whole model's.

    g(i, j) is a hidden state behind i layers of which j are skipped: the one of layer i over g(i - 1, j), and of
    g(i - 1, j - 1) as it is, that is nearer to the whole model's by cosine. The set is read off backwards from
    g(l, skips). That is CLaSp's algorithm, which is approximate: each g is the best of two, not of all sets.

    Args:
        layer: (i, states [B, skips + 1, hidden]) -> what layer i, counted from 0, makes of them.
        hidden: the whole model's states of one token of each row: the embedding, then behind every layer.
        weight: each row's part in the sum of cosines that decides.
        skips: at most the number of layers.
    """
    count = hidden.shape[1] - 1
    states = jnp.broadcast_to(hidden[:, :1], (hidden.shape[0], skips + 1, hidden.shape[2]))
    number, gone = np.arange(skips + 1), []
    for i in range(count):
        kept, left = layer(i, states), jnp.roll(states, 1, axis=1)
        near = [weight @ cosine(x, hidden[:, i + 1, None]) for x in (kept, left)]
        can_keep, can_leave = number <= i, (number >= 1) & (number <= i + 1)
        leave = can_leave & (~can_keep | (near[1] > near[0]))
        states = jnp.where(leave[:, None], left, kept)
        gone.append(leave)
    j, keep = jnp.int32(skips), []
    for leave in reversed(gone):
        keep.append(~leave[j])
        j = j - leave[j]
    return jnp.stack(keep[::-1])


def through(model: Llama, params: Any, state: Any, count: int) -> Callable[[int, Array], Array]:
    """(i, [B, count, hidden]) -> layer i of each of `count` states of the last token in a target's state.

    Each sees the text before that token, as the target computed it, and itself.
    """
    before = dataclasses.replace(state, length=jnp.maximum(state.length - 1, 0))
    batch = before.length.shape[0]
    position = jnp.broadcast_to(before.length[:, None], (batch, count))
    run = model.layer(before, position, jnp.broadcast_to(jnp.eye(count, dtype=bool), (batch, count, count)))
    own = [layers.unstack(x) for x in (params.layers, state.k, state.v)]
    return lambda i, x: run(x, i, *(part[i] for part in own), None, None)[0]


def cosine(x: Float[Array, "*b hidden"], y: Float[Array, "*c hidden"]) -> Float[Array, "*d"]:
    """Cosines of vectors, broadcast."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    size = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(y, axis=-1)
    return (x * y).sum(-1) / jnp.maximum(size, 1e-12)


def _all(features: Array | None) -> Array:
    if features is None:
        raise ValueError("target: got one without taps, takes one with all of them (`clasp.taps`)")
    return features
