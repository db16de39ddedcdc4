"""Coupled drafting: rank tokens by the chance that they are the target's choice, given the noise it will choose with.

The target's token at a position is argmax of z_p + T G, and the noise G is known before it is chosen. A drafter with
logits z_q takes the chance that token v will be it for

    softmax over candidates v of (a z_q(v) + b T G(v)).

A perfect drafter has large a = b; the worse the drafter, the smaller both, and b more than a; b = 0 is a tree by law
alone. Two weights per depth thus tell how far a drafter may be trusted. z is not divided by T: a drafter's error is one
of its logits, so the weights are much the same at every temperature, and greedy rows are T = 0. They are a multinomial
logit in two features, fitted while decoding from which candidate was chosen (`Learner`). Only past rounds are used, and
the text does not depend on it anyway: the target's choice is the same whatever was drafted.

The coupling: Daliri et al., "Coupling without Communication and Drafter-Invariant Speculative Decoding", arXiv
2408.07978.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from spec_jax import noise
from spec_jax.sampling import reduce, transform
from spec_jax.sampling.settings import SamplingRow


@flax.struct.dataclass
class Weights:
    """How far law and noise are trusted at each depth, the root's children first."""

    a: Float[Array, "d"]
    b: Float[Array, "d"]


@flax.struct.dataclass
class Candidates:
    """The best tokens at a position, their logits less the greatest (-inf: no token), and their noise times T."""

    tokens: Int[Array, "*b m"]
    z: Float[Array, "*b m"]
    noise: Float[Array, "*b m"]


def candidates(
    z: Float[Array, "vocab"],
    row: SamplingRow,
    noisy: Float[Array, "vocab"],
    a: Float[Array, ""],
    b: Float[Array, ""],
    m: int,
) -> Candidates:
    """The m tokens of the row's support with the greatest a z + b T G, in descending order.

    The whole vocabulary is looked at: at temperature 1 a token that is unlikely and lucky is the target's choice too
    often. (SmolLM2 at temperature 1, three layers skipped: of its choices 10 % are outside the drafter's 64 likeliest
    tokens, 4 % outside the 256 likeliest, and 0.4 % outside the 64 best by both.)

    Args:
        z: the drafter's logits, adjusted as `transform.adjust` does.
        row: the row's settings; its truncation leaves tokens out.
        noisy: the position's noise times the temperature, T G (`scaled_noise`).
        a: weight of the logits.
        b: weight of the noise.
        m: how many; at most the vocabulary's size.
    """
    kept = jnp.where(~row.sampled | transform.support(z, row), z, -jnp.inf)
    ids = reduce.top_tokens(jnp.where(kept > -jnp.inf, a * kept + b * noisy, -jnp.inf), m)
    tokens = jnp.maximum(ids, 0)
    relative = jnp.where(ids < 0, -jnp.inf, kept[tokens] - reduce.peak(kept))
    return Candidates(tokens, relative, noisy[tokens])


def scaled_noise(row: SamplingRow, key: noise.Key, position: Int[Array, ""], vocab: int) -> Float[Array, "vocab"]:
    """T G at a text position, the noise that the target's choice there will have."""
    return row.temperature * noise.gumbel(key, position, jnp.arange(vocab, dtype=jnp.int32))


def log_chance(c: Candidates, a: Float[Array, ""], b: Float[Array, ""]) -> Float[Array, "m"]:
    """The log-chance of each candidate to be the target's choice, if it is one of them."""
    live = c.z > -jnp.inf
    utility = jnp.where(live, a * c.z + b * c.noise, -jnp.inf)
    return jnp.where(live, utility - reduce.log_sum_exp(utility), -jnp.inf)


@flax.struct.dataclass
class Fit:
    """Per depth, the quadratic model of the log-likelihood so far: -w H w / 2 + r w, for w = (a, b)."""

    h: Float[Array, "d 2 2"]
    r: Float[Array, "d 2"]


@dataclasses.dataclass(frozen=True)
class Learner:
    """Fits the weights from past choices by recursive Newton steps, shared by all rows.

    The log-likelihood of each round is replaced by its second-order expansion at the weights it was drafted with, and
    the expansions are added up, old ones decayed. The weights are the maximum of the sum, where each depth is tied to
    the depth above it, and the first to (a, b), by a penalty of `pooling` |w - w above|^2 / 2: depths that are seldom
    reached lean on those that are reached often.

    Attributes:
        a: weight of the logits before anything was seen.
        b: weight of the noise.
        pooling: strength of the tie, in the unit of the likelihood's curvature: some choices' worth.
        decay: what is left of old rounds after one more.
    """

    a: float = 1.2
    b: float = 1.0
    pooling: float = 20.0
    decay: float = 0.998

    def __post_init__(self) -> None:
        """Check the settings."""
        for name in ("a", "b"):
            if not 0 <= getattr(self, name) < 1e3:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, takes a number in [0, 1000)")
        if not 0 < self.pooling < 1e9:
            raise ValueError(f"pooling: got {self.pooling!r}, takes a number above 0")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay: got {self.decay!r}, takes a number in (0, 1]")

    def init(self, depth: int) -> Fit:
        """Nothing seen."""
        return Fit(jnp.zeros((depth, 2, 2)), jnp.zeros((depth, 2)))

    def weights(self, fit: Fit) -> Weights:
        """The weights that fit best so far."""

        def step(above: Array, level: tuple[Array, Array]) -> tuple[Array, Array]:
            h, r = level
            w = jnp.linalg.solve(h + self.pooling * jnp.eye(2), r + self.pooling * above)
            return w, w

        w = lax.scan(step, jnp.array([self.a, self.b]), (fit.h, fit.r))[1]
        return Weights(w[:, 0], w[:, 1])

    def observe(self, fit: Fit, seen: Candidates, chosen: Int[Array, "b d"]) -> Fit:
        """The fit after a round.

        Args:
            fit: the fit that the round's weights came from.
            seen: the candidates [B, D, M] at each depth of the accepted paths.
            chosen: the target's choice there; below 0 where it is not known. One that is no candidate teaches nothing.
        """
        weights = self.weights(fit)
        w = jnp.stack([weights.a, weights.b], axis=-1)
        gradient, curvature = jax.vmap(jax.vmap(_expand), (None, 0, 0))(w, seen, chosen)
        h = curvature.sum(0)
        r = gradient.sum(0) + jnp.einsum("dij,dj->di", h, w)
        return Fit(self.decay * fit.h + h, self.decay * fit.r + r)


def _expand(w: Array, c: Candidates, chosen: Array) -> tuple[Float[Array, "2"], Float[Array, "2 2"]]:
    """Gradient and negative Hessian in w of the log-likelihood of one choice; zeros if it teaches nothing."""
    hit = (c.tokens == chosen) & (c.z > -jnp.inf)
    chance = jnp.exp(log_chance(c, w[0], w[1]))
    features = jnp.where(c.z > -jnp.inf, jnp.stack([c.z, c.noise]), 0.0)
    from_mean = features - (features @ chance)[:, None]
    known = hit.any() & (chosen >= 0)
    gradient = jnp.where(hit, from_mean, 0.0).sum(-1)
    return jnp.where(known, gradient, 0.0), jnp.where(known, (from_mean * chance) @ from_mean.T, 0.0)
