"""What a relaxed rule lets pass: sets of tokens read off the target's law, and heads that judge a node's features."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from spec_jax.sampling import reduce


@dataclasses.dataclass(frozen=True)
class Acceptable:
    """Which tokens pass besides the target's own choice: those that meet every condition given; none if none is given.

    All look at the target's law p alone, so what they refuse is a lower level set of p (or everything).

    Attributes:
        top_k: among the k likeliest (of ties the lowest ids).
        log_gap: log p(x) > log max p - log_gap, in nats.
        gap: p(x) > max p - gap.
        epsilon, delta: p(x) > min(epsilon, delta exp(-H(p))), H in nats; an absent one counts as infinite.
        min_entropy: H(p) > min_entropy, in nats.
    """

    top_k: int | None = None
    log_gap: float | None = None
    gap: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    min_entropy: float | None = None

    def __post_init__(self) -> None:
        """Check the conditions."""
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 0):
            raise ValueError(f"top_k: got {self.top_k!r}, takes an integer of at least 0")
        for name in ("log_gap", "gap", "epsilon", "delta", "min_entropy"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name}: got {value!r}, takes a number of at least 0")

    def mask(self, log_p: Float[Array, "vocab"]) -> Bool[Array, "vocab"]:
        """The tokens that pass under the law exp(log_p)."""
        p, top, passes = jnp.exp(log_p), reduce.peak(log_p), []
        entropy = -reduce.total(jnp.where(p > 0, p * log_p, 0.0))
        if self.top_k is not None:
            ids = lax.top_k(log_p, min(self.top_k, p.shape[0]))[1]
            passes.append(jnp.zeros(p.shape, bool).at[ids].set(True))
        if self.log_gap is not None:
            passes.append(log_p > top - self.log_gap)
        if self.gap is not None:
            passes.append(p > jnp.exp(top) - self.gap)
        if self.epsilon is not None or self.delta is not None:
            epsilon, delta = (math.inf if x is None else x for x in (self.epsilon, self.delta))
            passes.append(p > jnp.minimum(epsilon, delta * jnp.exp(-entropy)))
        if self.min_entropy is not None:
            passes.append(jnp.broadcast_to(entropy > self.min_entropy, p.shape))
        if not passes:
            return jnp.zeros(p.shape, bool)
        return jnp.stack(passes).all(0) & (log_p > -jnp.inf)


@dataclasses.dataclass(frozen=True)
class LinearHead:
    """sigmoid(weight . features + bias) of a node: whether it exceeds `threshold` (a judge); `chance` is the number."""

    weight: tuple[float, ...]
    bias: float = 0.0
    threshold: float = 0.5

    def __call__(self, features: Array) -> Array:
        """Whether the node passes; never at threshold 1."""
        return self.chance(features) > self.threshold

    def chance(self, features: Array) -> Array:
        """The head's output in [0, 1]."""
        if features.size != len(self.weight):
            raise ValueError(f"weight: got {len(self.weight)} numbers, takes one for each of {features.size} features")
        return jax.nn.sigmoid(features.reshape(-1).astype(jnp.float32) @ jnp.asarray(self.weight) + self.bias)
