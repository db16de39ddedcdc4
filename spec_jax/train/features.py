"""The target's features of texts: what a drafter reads, and what gives the target's law at any place of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from spec_jax.models.target import Target
from spec_jax.train.store import Text

_FILE, _ABOUT = "features.npy", "features.json"
_TYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


class Teacher(Target, Protocol):
    """A target whose features can be turned into logits."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Which layers' outputs are the features."""
        ...

    def logits(self, params: Any, hidden: Float[Array, "b n hidden"]) -> Float[Array, "b n vocab"]:
        """The head, with the final norm in front."""
        ...


def read(
    target: Teacher, params: Any, tokens: Int[Array, "b t"], length: Int[Array, "b"]
) -> Float[Array, "b t taps hidden"]:
    """The features of every token, in one pass over the texts; no gradient. Those behind a length mean nothing."""
    state = target.init_state(params, *tokens.shape)
    features, _ = target.prefill(params, state, tokens, length)
    if features is None:
        raise ValueError("target: got one without taps, takes one that returns features")
    return lax.stop_gradient(features)


def with_last(target: Any, num_layers: int) -> Any:
    """The target with the last layer's output as its last tap: what `logits` takes."""
    return target if target.taps[-1:] == (num_layers,) else dataclasses.replace(target, taps=(*target.taps, num_layers))


class Cache:
    """Features of texts in one file, in float16 or bfloat16, read piece by piece as they are needed."""

    def __init__(self, directory: str | Path) -> None:
        """Open a cache; FileNotFoundError if there is none, or it is not complete."""
        self.directory = Path(directory)
        path = self.directory / _ABOUT
        if not path.exists():
            raise FileNotFoundError(f"directory: {directory} holds no complete cache of features")
        self.about = json.loads(path.read_text(encoding="utf-8"))
        self._rows = np.load(self.directory / _FILE, mmap_mode="r", allow_pickle=False)
        self._ends = np.cumsum(self.about["lengths"])

    def __len__(self) -> int:
        """How many texts."""
        return len(self.about["lengths"])

    def __getitem__(self, i: int) -> np.ndarray:
        """The features [t, taps, hidden] of text i."""
        end = self._ends[i]
        return self._rows[end - self.about["lengths"][i] : end].view(_TYPES[self.about["dtype"]])

    @classmethod
    def write(
        cls,
        directory: str | Path,
        target: Teacher,
        params: Any,
        texts: Sequence[Text],
        dtype: str = "bfloat16",
        batch: int = 8,
    ) -> Cache:
        """Compute and keep the features of texts; rows of a pass are padded to a power of two, to compile little."""
        if dtype not in _TYPES:
            raise ValueError(f"dtype: got {dtype!r}, takes {' or '.join(_TYPES)}")
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / _ABOUT).unlink(missing_ok=True)
        lengths = [len(text.tokens) for text in texts]
        ends = np.cumsum(lengths)
        run, rows = jax.jit(lambda *given: read(target, *given)), None
        by_length = np.argsort(lengths, kind="stable")
        for begin in range(0, len(texts), batch):
            some = by_length[begin : begin + batch]
            size = 1 << max(lengths[i] - 1 for i in some).bit_length()
            tokens = np.zeros((batch, size), np.int32)
            for row, i in zip(tokens, some, strict=False):
                row[: lengths[i]] = texts[i].tokens
            count = np.array([*(lengths[i] for i in some), *[1] * (batch - len(some))], np.int32)
            found = np.asarray(run(params, jnp.asarray(tokens), jnp.asarray(count)), np.float32)
            if rows is None:
                shape = (int(ends[-1]), *found.shape[2:])
                stored = np.float16 if dtype == "float16" else np.uint16
                rows = np.lib.format.open_memmap(directory / _FILE, mode="w+", dtype=stored, shape=shape)
            for row, i in zip(found, some, strict=False):
                rows[ends[i] - lengths[i] : ends[i]] = row[: lengths[i]].astype(_TYPES[dtype]).view(rows.dtype)
        if rows is None:
            raise ValueError("texts: got none, takes at least one")
        rows.flush()
        about = {"dtype": dtype, "lengths": lengths, "taps": list(target.taps)}
        (directory / _ABOUT).write_text(json.dumps(about), encoding="utf-8")
        return cls(directory)
