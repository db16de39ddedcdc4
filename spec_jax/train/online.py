"""Learning from serving: a bounded buffer of what was served, a training step now and then, parameters swapped.

OSD (arXiv 2310.07177) distils the target on the requests it answers; Aurora does so while it serves. A round of it is
`remember` (or `push`), `update`, and `evaluate.swap`: two pure functions, and no compilation after the first time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from spec_jax.engine.decoder import Result
from spec_jax.train import divergence, features
from spec_jax.train.features import Teacher
from spec_jax.train.loader import Batch, Texts
from spec_jax.train.responses import as_text
from spec_jax.train.step import Metrics, TrainState


@flax.struct.dataclass
class Buffer:
    """The newest rows of a tree of arrays [capacity, ...]; `pushed` counts all that ever came."""

    rows: Any
    pushed: Int[Array, ""]

    @property
    def capacity(self) -> int:
        """Most rows."""
        return jax.tree.leaves(self.rows)[0].shape[0]

    @property
    def count(self) -> Int[Array, ""]:
        """Rows that are there."""
        return jnp.minimum(self.pushed, self.capacity)


def empty(like: Any, capacity: int) -> Buffer:
    """A buffer without rows, for rows like those of a batch (any leading axis)."""
    if capacity < 1:
        raise ValueError(f"capacity: got {capacity}, takes 1 or more")
    zeros = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape[1:]), x.dtype), like)
    return Buffer(zeros, jnp.zeros((), jnp.int32))


def push(buffer: Buffer, rows: Any, keep: Bool[Array, "n"]) -> Buffer:
    """The buffer with the rows that `keep` marks; the oldest make room. Of more rows than it holds, the last stay."""
    place = jnp.cumsum(keep) - 1
    total, size = keep.sum(), buffer.capacity
    stays = keep & (place >= total - size)
    slot = jnp.where(stays, (buffer.pushed + place) % size, size)
    put = lambda to, x: to.at[slot].set(x.astype(to.dtype), mode="drop")  # noqa: E731
    return Buffer(jax.tree.map(put, buffer.rows, rows), buffer.pushed + total.astype(jnp.int32))


def draw(buffer: Buffer, key: Array, n: int) -> tuple[Any, Bool[Array, "n"]]:
    """n rows drawn with repeats from those that are there, and whether they are: an empty buffer has none."""
    at = jax.random.randint(key, (n,), 0, jnp.maximum(buffer.count, 1))
    return jax.tree.map(lambda x: x[at], buffer.rows), jnp.broadcast_to(buffer.count > 0, (n,))


def served(results: Sequence[Result], length: int) -> Texts:
    """Finished requests as rows of `length` tokens: the last ones of longer texts."""
    n = len(results)
    tokens, mask, lengths = np.zeros((n, length), np.int32), np.zeros((n, length), bool), np.zeros(n, np.int32)
    for i, result in enumerate(results):
        text = as_text(result, i)
        lengths[i] = size = min(length, len(text.tokens))
        tokens[i, :size], mask[i, :size] = text.tokens[-size:], text.mask[-size:]
    return Texts(jnp.asarray(tokens), jnp.asarray(mask), jnp.asarray(lengths))


def remember(
    buffer: Buffer, target: Teacher, params: Any, texts: Texts, keep: Bool[Array, "n"] | None = None
) -> Buffer:
    """Push texts with the target's features, the last layer's among them: from that its law comes at every token.

    A buffer made `like` texts whose features are bfloat16 keeps them so.
    """
    found = features.read(target, params, texts.tokens, texts.length)
    rows = dataclasses.replace(texts, features=found)
    return push(buffer, rows, jnp.ones(texts.length.shape, bool) if keep is None else keep)


def update(
    step: Callable[[TrainState, Any, Any], tuple[TrainState, Metrics]],
    state: TrainState,
    buffer: Buffer,
    key: Array,
    rate: Any,
    batch: int,
    target: Any,
    shared: Any = None,
) -> tuple[TrainState, Metrics]:
    """A training step on texts from the buffer; without any, the loss and the gradient are zero.

    Args:
        step: see `step.make_step`; its loss a `Task`'s. The state given is used up.
        state: what was trained so far.
        buffer: rows that are `Texts`. Those without features are read by the target's forward with `target`.
        key: a typed key, another one each time.
        rate: the learning rate.
        batch: rows of the step.
        target: the target's parameters.
        shared: see `Batch`.
    """
    texts, real = draw(buffer, key, batch)
    texts = dataclasses.replace(texts, mask=texts.mask & real[:, None])
    return step(state, Batch(texts, jnp.copy(state.step), target, shared), rate)


def feedback(
    logits: Float[Array, "*b k draft"],
    committed: Int[Array, "*b k"],
    drafted: Int[Array, "*b k"],
    accepted: Int[Array, "*b"],
    penalty: float = 1.0,
) -> Float[Array, ""]:
    """Accepted tokens as positive, the rejected one as negative examples: Aurora's feedback in our reading.

    The abstract gives no formula. Here: -log q of the committed tokens up to and including the one that took the place
    of the first rejected token, and penalty x -log(1 - q(rejected token)) there; mean over those slots. What was
    drafted behind it is not judged: the target never saw its true prefix. -1 as a committed token leaves its slot out.

    Args:
        logits: the drafter's, over the vocabulary of the tokens.
        committed: the tokens that the text has there.
        drafted: the tokens that were drafted.
        accepted: how many drafted tokens of each block were accepted.
        penalty: weight of the negative examples.
    """
    at = jnp.arange(committed.shape[-1])
    judged = (at <= accepted[..., None]) & (committed >= 0)
    first = judged & (at == accepted[..., None]) & (drafted != committed)
    z = jnp.where(judged[..., None], logits, 0.0)
    up = divergence.cross_entropy(z, jnp.where(judged, committed, 0))
    chance = jnp.exp(-divergence.cross_entropy(z, jnp.where(first, drafted, 0)))
    down = -jnp.log(jnp.maximum(1 - chance, np.exp(divergence.ZERO / 4)))
    total = jnp.where(judged, up, 0.0).sum() + penalty * jnp.where(first, down, 0.0).sum()
    return total / jnp.maximum(judged.sum(), 1)
