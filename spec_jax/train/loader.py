"""Batches of texts by their number alone, so that a run that goes on at step s reads what it would have read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.struct
import grain
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from spec_jax.train import mesh as meshes
from spec_jax.train.store import Text


@flax.struct.dataclass
class Texts:
    """A batch of texts, padded behind their lengths; features [B, T, taps, hidden] if they are cached, else None.

    weight: how much each text counts in the loss, from 0 on; None: all alike.
    """

    tokens: Int[Array, "b t"]
    mask: Bool[Array, "b t"]
    length: Int[Array, "b"]
    features: Float[Array, "b t taps hidden"] | None = None
    weight: Float[Array, "b"] | None = None


@flax.struct.dataclass
class Batch:
    """What a training step reads beside the trained parameters, which none of this is.

    step: the number of the step. target: the target's parameters. shared: arrays that the drafter reads and does not
    train, such as its vocabulary map.
    """

    texts: Texts
    step: Int[Array, ""]
    target: Any = None
    shared: Any = None


def windows(texts: Sequence[Text], length: int, batch: int, seed: int, features: Any = None) -> grain.MapDataset:
    """Endless shuffled batches: item i is batch i, a dict of tokens, mask and length (and features), as numpy arrays.

    A longer text is cut to a window of `length` tokens that holds some of what the loss counts, anew in every epoch.

    Args:
        texts: texts in which the loss counts something; others are left out.
        length: tokens of a row.
        batch: rows.
        seed: of order and windows.
        features: a row of arrays [t, taps, hidden] per text of `texts`, if they are cached.

    Raises:
        ValueError: for fewer texts than a batch needs.
    """
    used = [i for i, text in enumerate(texts) if text.mask[1:].any()]
    if len(used) < batch:
        raise ValueError(f"texts: got {len(used)} in which the loss counts a token, takes at least a batch, {batch}")

    def cut(i: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        text, size = texts[used[i]], min(length, len(texts[used[i]].tokens))
        counted = np.flatnonzero(text.mask[1:]) + 1
        last = len(text.tokens) - size
        pick = int(counted[rng.integers(len(counted))])
        start = int(rng.integers(max(0, pick - size + 1), min(last, pick - 1) + 1)) if last else 0
        fill = lambda x: np.pad(x[start : start + size], [(0, length - size)] + [(0, 0)] * (x.ndim - 1))  # noqa: E731
        row = {"tokens": fill(text.tokens), "mask": fill(text.mask), "length": np.int32(size)}
        return row if features is None else row | {"features": fill(np.asarray(features[used[i]]))}

    order = grain.MapDataset.range(len(used)).seed(seed).shuffle().random_map(cut)
    return order.batch(batch, drop_remainder=True).repeat()


class Feed:
    """Batches as a training step takes them: the texts, with the parameters that the loss reads beside its own."""

    def __init__(self, batches: grain.MapDataset, target: Any, shared: Any = None, mesh: Any = None) -> None:
        """target and shared are read by every step; with a mesh they are copied to it, and texts split over it."""
        self._batches, self._mesh = batches, mesh
        self._target, self._shared = (meshes.replicate(x, mesh) for x in (target, shared))

    def __getitem__(self, step: int) -> Batch:
        """The batch of a step."""
        rows: Any = self._batches[step]
        features = jnp.asarray(rows["features"]) if "features" in rows else None
        texts = Texts(jnp.asarray(rows["tokens"]), jnp.asarray(rows["mask"]), jnp.asarray(rows["length"]), features)
        number = meshes.replicate(jnp.int32(step), self._mesh)
        return Batch(meshes.split(texts, self._mesh), number, self._target, self._shared)
