"""Texts as one long row of tokens, and batches of windows of it by their number alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import grain
import numpy as np
from jaxtyping import Int


def pack(texts: Iterable[Sequence[int]], eos: int) -> Int[np.ndarray, "n"]:
    """Texts one after another, each ended by `eos`; int32."""
    parts = [np.append(np.asarray(text, np.int32), np.int32(eos)) for text in texts]
    if not parts:
        raise ValueError("texts: got none, takes at least one")
    return np.concatenate(parts)


def windows(tokens: Int[np.ndarray, "n"], length: int, stride: int, batch: int, seed: int) -> grain.MapDataset:
    """Endless shuffled batches [batch, length] of windows: item i is batch i, whatever was read before.

    An epoch has a window about every `stride` tokens, cut anew in each. A run that goes on at step s reads item s, so
    nothing about the data has to be saved. ValueError for fewer tokens than a batch of windows needs.
    """
    count = (len(tokens) - length - stride + 1) // stride + 1
    if count < batch:
        raise ValueError(
            f"tokens: got {len(tokens)}, takes at least {length + batch * stride - 1} for {batch} windows of {length}"
        )

    def cut(window: int, rng: np.random.Generator) -> np.ndarray:
        start = window * stride + rng.integers(stride)
        return tokens[start : start + length]

    # batch comes before repeat, so that no batch holds a window twice
    return grain.MapDataset.range(count).seed(seed).shuffle().random_map(cut).batch(batch, drop_remainder=True).repeat()


def whole(tokens: Int[np.ndarray, "n"], length: int, overlap: int, batch: int) -> Int[np.ndarray, "steps batch length"]:
    """Windows from the start to the end, each beginning with the last `overlap` tokens of the one before.

    What does not fill a batch is left out; ValueError if that is all.
    """
    step = length - overlap
    count = (len(tokens) - overlap) // step // batch * batch
    if count < 1:
        raise ValueError(f"tokens: got {len(tokens)}, takes at least {batch * step + overlap}")
    return np.stack([tokens[i * step : i * step + length] for i in range(count)]).reshape(-1, batch, length)
