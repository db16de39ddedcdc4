"""Temperatures for DSpark's confidences, fitted on what was accepted (sequential temperature scaling)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, Float


def calibrate(
    logits: npt.ArrayLike,
    accepted: npt.ArrayLike,
    bins: int = 10,
    grid: tuple[float, ...] = tuple(float(x) for x in np.geomspace(0.1, 10.0, 81)),
) -> Float[np.ndarray, "d"]:
    """A temperature for each depth's confidence logit, found from the first depth to the last on a grid.

    Each minimises the expected calibration error of the product of confidences down to its depth, those before it being
    set already, against whether all tokens down to it were accepted. `MarkovParams.temperature` takes the result.

    Args:
        logits: uncalibrated, [n, d], of n drafts.
        accepted: [n, d], whether each depth's token was accepted; behind a refused one it is not looked at.
        bins: of equal width, over which the error is taken.
        grid: temperatures that are tried; of equally good ones that nearest to 1.

    Source: DSpark, arXiv 2607.05147.
    """
    z, right = np.asarray(logits, np.float64), np.cumprod(np.asarray(accepted, bool), axis=1) > 0
    if z.shape != right.shape or z.ndim != 2 or not z.size:
        raise ValueError(f"logits: got shape {z.shape} with accepted of {right.shape}, takes the same [n, d]")
    tried = sorted(grid, key=lambda t: abs(np.log(t)))
    before, found = np.ones(len(z)), []
    for d in range(z.shape[1]):
        chances = [before / (1 + np.exp(-z[:, d] / t)) for t in tried]
        best = int(np.argmin([calibration_error(c, right[:, d], bins) for c in chances]))
        before = chances[best]
        found.append(tried[best])
    return np.array(found)


def calibration_error(chance: Float[np.ndarray, "n"], right: Bool[np.ndarray, "n"], bins: int = 10) -> float:
    """The mean gap between chances and the share that was right, over bins of equal width, weighted by their counts."""
    at = np.minimum((chance * bins).astype(int), bins - 1)
    count = np.bincount(at, minlength=bins)
    gap = np.bincount(at, chance, bins) - np.bincount(at, right.astype(float), bins)
    return float(np.abs(gap[count > 0]).sum() / len(chance))
