"""Whether two sets of samples have one law: means with an interval, and permutation tests within prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

LEVEL = 0.01


def compare(
    first: dict[str, Float[np.ndarray, "p n"]],
    second: dict[str, Float[np.ndarray, "p m"]],
    texts: tuple[Sequence[Sequence[Any]], Sequence[Sequence[Any]]],
    draws: int = 2000,
    seed: int = 0,
) -> dict[str, Any]:
    """Figures of n and m samples of each of p prompts, and their whole texts.

    Returns, for each figure, both means, their difference, half the width of its 95 % interval (normal, from the spread
    within prompts) and the p-value of a permutation test; for the texts, the p-value of one whose statistic is the
    squared distance between both sides' frequencies of every text; and `equal`: no p-value under `LEVEL` by
    Bonferroni's correction. The tests permute the samples of each prompt, so they hold for any law and any number.
    """
    rng = np.random.default_rng(seed)
    out: dict[str, Any] = {"figures": {}}
    for name, one in first.items():
        other = second[name]
        variance = one.var(1, ddof=1) / one.shape[1] + other.var(1, ddof=1) / other.shape[1]
        out["figures"][name] = {
            "first": float(one.mean()),
            "second": float(other.mean()),
            "difference": float(one.mean() - other.mean()),
            "half_width": float(1.96 * np.sqrt(variance.sum()) / len(one)),
            "p_value": _means(one, other, draws, rng),
        }
    out["texts_p_value"] = _texts(*texts, draws, rng)
    found = [f["p_value"] for f in out["figures"].values()] + [out["texts_p_value"]]
    return out | {"equal": min(found) >= LEVEL / len(found)}


def _means(one: np.ndarray, other: np.ndarray, draws: int, rng: np.random.Generator) -> float:
    pooled, n = np.concatenate([one, other], axis=1), one.shape[1]
    apart = lambda x: abs(x[:, :n].mean() - x[:, n:].mean())  # noqa: E731
    least = apart(pooled) - 1e-12
    return (1 + sum(apart(rng.permuted(pooled, axis=1)) >= least for _ in range(draws))) / (1 + draws)


def _texts(one: Sequence[Sequence[Any]], other: Sequence[Sequence[Any]], draws: int, rng: np.random.Generator) -> float:
    pooled, cells = _numbered([[*a, *b] for a, b in zip(one, other, strict=True)])
    n = len(one[0])

    def apart(x: Int[np.ndarray, "p n"]) -> float:
        count = lambda y: np.bincount(y.reshape(-1), minlength=cells) / y.shape[1]  # noqa: E731
        return float(((count(x[:, :n]) - count(x[:, n:])) ** 2).sum())

    least = apart(pooled) - 1e-12
    return (1 + sum(apart(rng.permuted(pooled, axis=1)) >= least for _ in range(draws))) / (1 + draws)


def _numbered(texts: list[list[Any]]) -> tuple[Int[np.ndarray, "p n"], int]:
    """A number for each text of each prompt, and how many there are."""
    known: dict[Any, int] = {}
    rows = [[known.setdefault((i, tuple(text)), len(known)) for text in row] for i, row in enumerate(texts)]
    return np.array(rows), len(known)
