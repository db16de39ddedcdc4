"""EntMTP: several static trees, of which a running entropy chooses one per round."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spec_jax.topology.compact import LEAST
from spec_jax.topology.pool import Pool, best
from spec_jax.topology.static import Template
from spec_jax.tree import Draft


@dataclasses.dataclass(frozen=True)
class TopologyBank:
    """Templates padded to one size, in order of the entropy they are for.

    Attributes:
        templates: the trees, the first for the lowest entropy.
        thresholds: entropies in nats, ascending; template i serves those from thresholds[i - 1] on up to thresholds[i].

    Source: EntMTP, arXiv 2606.27550. What is compiled is one tree of the largest size; a controller that cuts unused
    nodes (`WidestLive`) makes the smaller ones cheaper.
    """

    templates: tuple[Template, ...]
    thresholds: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check the settings."""
        if not self.templates or len(self.thresholds) != len(self.templates) - 1:
            raise ValueError(
                f"thresholds: got {len(self.thresholds)} for {len(self.templates)} templates, takes one fewer"
            )
        if list(self.thresholds) != sorted(set(self.thresholds)):
            raise ValueError(f"thresholds: got {self.thresholds}, takes ascending numbers")

    @property
    def nodes(self) -> int:
        """Nodes of the largest template."""
        return max(t.nodes for t in self.templates)

    @property
    def depth(self) -> int:
        """Depth of the deepest template."""
        return max(t.depth for t in self.templates)

    @functools.cached_property
    def _padded(self) -> tuple[np.ndarray, ...]:
        """Pool parents, ranks and depths of every template's nodes but the root; depth 0: no node."""
        shapes = np.zeros((3, len(self.templates), self.nodes - 1), np.int32)
        shapes[0] = -1
        for i, t in enumerate(self.templates):
            shapes[:, i, : t.nodes - 1] = np.array([t.parent, t.rank, t.depths])[:, 1:] - np.array([[1], [0], [0]])
        return tuple(shapes)

    def choose(self, entropy: Float[Array, ""]) -> Int[Array, ""]:
        """The index of the template for an entropy in nats."""
        return (entropy >= jnp.asarray(self.thresholds, jnp.float32).reshape(-1)).sum(dtype=jnp.int32)

    def place(
        self, which: Int[Array, ""], anchor: Int[Array, ""], ids: Int[Array, "d k"], chance: Float[Array, "d k"]
    ) -> Draft:
        """`static.place` for the chosen template, padded to the largest size ("point").

        Raises:
            ValueError: for fewer depths or ranks than a template has.
        """
        width = max(t.width for t in self.templates)
        if ids.shape[0] < self.depth or ids.shape[1] < width:
            raise ValueError(f"ids: got {ids.shape[0]} depths of {ids.shape[1]} ranks, takes {self.depth} of {width}")
        parent, rank, depth = (jnp.asarray(x)[which] for x in self._padded)
        at = jnp.maximum(depth - 1, 0)
        token = ids[at, rank]
        used = (depth > 0) & (token >= 0)
        own = jnp.log(jnp.clip(chance[at, rank], LEAST, 1.0))
        log_chance = _along_paths(jnp.where(used, own, -jnp.inf), parent, self.depth)
        return best(Pool(token, parent, log_chance), anchor, self.nodes)


def entropy(log_probs: Float[Array, "v"]) -> Float[Array, ""]:
    """Entropy of a law, in nats."""
    return -jnp.where(log_probs > -jnp.inf, jnp.exp(log_probs) * log_probs, 0.0).sum()


def running(old: Float[Array, ""], new: Float[Array, ""], keep: float = 0.8) -> Float[Array, ""]:
    """The running estimate of entropy after one more round: `keep` of the old one and the rest of the new one."""
    return keep * old + (1 - keep) * new


def _along_paths(own: Float[Array, "p"], parent: Int[Array, "p"], depth: int) -> Float[Array, "p"]:
    """Sums of `own` along root paths, parents' first, so that none is above its parent's; one turn per depth."""
    total = jnp.where(parent < 0, own, 0.0)
    for _ in range(depth - 1):
        total = jnp.where(parent < 0, own, total[jnp.maximum(parent, 0)] + own)
    return total
