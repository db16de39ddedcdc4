"""A reduced draft vocabulary: which of the target's tokens a drafter can say, and how laws and labels map to it.

`kept` are the target's ids of the draft vocabulary's tokens, ascending: draft id i means token kept[i] (FR-Spec and
EAGLE-3 choose the most frequent ones). Files hold it as `d2t`, the offsets kept[i] - i, and `t2d`, a flag per token.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int


def count(texts: Iterable[Int[np.ndarray, "_"]], vocab: int) -> Int[np.ndarray, "vocab"]:
    """How often each token occurs; give it the tokens that the loss counts.

    Raises ValueError for a token outside the vocabulary.
    """
    total = np.zeros(vocab, np.int64)
    for text in texts:
        if len(text) and not (0 <= text.min() and text.max() < vocab):
            raise ValueError(f"texts: got token ids {text.min()} .. {text.max()}, takes ids 0 .. {vocab - 1}")
        total += np.bincount(text, minlength=vocab)
    return total


def most_frequent(counts: Int[np.ndarray, "vocab"], size: int, always: Iterable[int] = ()) -> Int[np.ndarray, "kept"]:
    """The `size` most frequent tokens, ascending; of equal ones the lower ids. `always` are among them in any case.

    Raises ValueError for a size that is not 1 .. the vocabulary's, or below the number of `always`.
    """
    must = sorted(set(always))
    if not max(1, len(must)) <= size <= len(counts):
        raise ValueError(f"size: got {size}, takes {max(1, len(must))} .. {len(counts)}")
    weight = counts.astype(np.int64)
    weight[must] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-weight, kind="stable")[:size]).astype(np.int32)


def offsets(kept: Int[np.ndarray, "kept"]) -> Int[np.ndarray, "kept"]:
    """`d2t` as files hold it: kept[i] - i, int64."""
    return kept.astype(np.int64) - np.arange(len(kept))


def flags(kept: Int[np.ndarray, "kept"], vocab: int) -> Bool[np.ndarray, "vocab"]:
    """`t2d` as files hold it: whether the draft vocabulary has each of the target's tokens."""
    found = np.zeros(vocab, bool)
    found[kept] = True
    return found


def restrict(target: Float[Array, "*b vocab"], kept: Int[Array, "kept"] | None) -> Float[Array, "*b kept"]:
    """The target's logits for the draft vocabulary's tokens; their softmax is the target's law renormalised on it."""
    return target if kept is None else jnp.take(target, kept, axis=-1)


def to_draft(tokens: Int[Array, "*b"], kept: Int[Array, "kept"] | None) -> Int[Array, "*b"]:
    """The draft ids of tokens, -1 for those that the draft vocabulary lacks."""
    if kept is None:
        return tokens
    at = jnp.minimum(jnp.searchsorted(kept, tokens), kept.shape[0] - 1)
    return jnp.where(kept[at] == tokens, at, -1).astype(jnp.int32)


def kept_mass(target: Float[Array, "*b vocab"], kept: Int[Array, "kept"] | None) -> Float[Array, "*b"]:
    """The target's probability of the draft vocabulary: no drafter is accepted more often than that."""
    if kept is None:
        return jnp.ones(target.shape[:-1])
    z = target.astype(jnp.float32)
    z = z - lax.stop_gradient(z.max(-1, keepdims=True))
    return jnp.exp(jnp.take(z, kept, axis=-1)).sum(-1) / jnp.exp(z).sum(-1)
