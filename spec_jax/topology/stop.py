"""Where a draft tree should end: node counts from chances in descending order and what each count costs.

A rule takes `chance` [n], the path chances of the nodes in order (1 for the root; summed over the rows of a batch they
are a rule for the batch), and `cost` [n], the time of a round of 1 .. n nodes, drafting included. It returns how many
nodes to verify, at least 1. Expected tokens of n nodes are the sum of the first n chances.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Rule = Callable[[Float[Array, "n"], Float[Array, "n"]], Int[Array, ""]]


def marginal(chance: Float[Array, "n"], cost: Float[Array, "n"]) -> Int[Array, ""]:
    """Add the next node while it is worth more per unit of cost than the tree so far: the first peak of tokens / cost.

    One rule under three names. CaDDTree (arXiv 2606.01813): stop where theta(n) = tokens / cost does not grow. SMART
    (arXiv 2604.09731): expand a node if its benefit over its cost exceeds the tree's speed-up. CAST (arXiv 2610.00321):
    chance >= tokens / cost x slope of the cost, with `linear_cost`. They differ on a tie, where this one stops.
    For chances that descend and a convex cost it finds the best tree. It looks at no node behind the one it stops at.
    """
    tokens = jnp.cumsum(chance)
    grows = chance[1:] * cost[:-1] > tokens[:-1] * (cost[1:] - cost[:-1])
    return 1 + jnp.cumprod(grows).sum(dtype=jnp.int32)


def most(chance: Float[Array, "n"], cost: Float[Array, "n"]) -> Int[Array, ""]:
    """The node count of the most tokens per unit of cost, for any cost; the smallest of equals."""
    return 1 + jnp.argmax(jnp.cumsum(chance) / cost).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Likely:
    """The rule that keeps the nodes before the first of a chance below `least`, whatever they cost."""

    least: float

    def __call__(self, chance: Float[Array, "n"], cost: Float[Array, "n"]) -> Int[Array, ""]:
        """The node count."""
        return 1 + jnp.cumprod(chance[1:] >= self.least).sum(dtype=jnp.int32)


def round_up(count: Int[Array, ""], widths: Sequence[int]) -> Int[Array, ""]:
    """The index of the narrowest compiled width that holds `count` nodes; the widest if none does."""
    return jnp.minimum((jnp.asarray(widths) < count).sum(dtype=jnp.int32), len(widths) - 1)


def linear_cost(nodes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Base and slope of the straight line that fits measured round times best, the slope at least 0 (CAST)."""
    x, y = _measured(nodes, seconds)
    slope = max(0.0, float(np.polyfit(x, y, 1)[0])) if len(x) > 1 else 0.0
    return float(y.mean() - slope * x.mean()), slope


def convex_cost(nodes: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...]:
    """Measured round times made ascending and convex, so that `marginal` finds the best count (after CaDDTree).

    Slopes that fall are pooled by weighted isotonic regression, those below 0 are 0; the line keeps its mean.
    """
    x, y = _measured(nodes, seconds)
    blocks: list[tuple[float, float, int]] = []
    for gap, rise in zip(np.diff(x), np.diff(y), strict=True):
        blocks.append((float(rise), float(gap), 1))
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            (rise1, gap1, n1), (rise2, gap2, n2) = blocks.pop(-2), blocks.pop()
            blocks.append((rise1 + rise2, gap1 + gap2, n1 + n2))
    slopes = np.concatenate([[max(0.0, rise / gap)] * n for rise, gap, n in blocks]) if blocks else np.zeros(0)
    fitted = np.concatenate([[0.0], np.cumsum(slopes * np.diff(x))])
    return tuple(float(value) for value in fitted + (y.mean() - fitted.mean()))


def _measured(nodes: Sequence[int], seconds: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(nodes, float), np.asarray(seconds, float)
    if x.shape != y.shape or x.ndim != 1 or not x.size or not (np.diff(x) > 0).all():
        raise ValueError(f"nodes: got {list(nodes)} for {len(seconds)} times, takes ascending counts, one per time")
    return x, y
