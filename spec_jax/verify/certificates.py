"""Certificates of acceptance: how far a drafter must be from the target before its choice can be refused.

A drafter whose law is q proposes its m likeliest tokens (m = 1: its argmax); the target, whose law is p, accepts the
tokens of a set A. As long as q is closer to p than the certificate, one of A is among them. Closeness is KL(p || q),
the divergence that distillation minimises, or KL(q || p) with reverse=True. The setting is that of "When is a draft
accepted? A theory of acceptance in speculative decoding" (arXiv 2606.30265), whose abstract leaves the direction open;
the closed forms are derived here from first principles.

Nothing of A is among q's m likeliest iff m tokens outside A have at least the probability of every token in A (a tie
may go either way). Of all sets of m tokens outside A the likeliest ones under p, Y, cost least: exchanging q's values
of two of them never raises the divergence. What is left is convex; its stationary point pools: tokens of A above a
level c fall to it, tokens of Y below it rise to it, all others keep p. Forward, c is the arithmetic mean of the pool's
probabilities, and the divergence is the sum of p log(p / c) over the pool; in reverse c is the geometric mean, the law
is renormalised, and the divergence is -log(1 - sum of (p - c)).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from spec_jax.sampling import reduce
from spec_jax.verify.acceptable import Acceptable


def accepted_by(p: Float[Array, "v"], accepts: Acceptable | None = None) -> Bool[Array, "v"]:
    """The tokens that a greedy row accepts: the likeliest one, and what a relaxed rule lets pass; None is strict."""
    choice = jnp.arange(p.shape[0]) == reduce.argmax(p)
    return choice if accepts is None else choice | accepts.mask(jnp.log(p))


def kl_to_reject(
    p: Float[Array, "v"], accepted: Bool[Array, "v"], m: int = 1, reverse: bool = False
) -> Float[Array, ""]:
    """The least divergence, in nats, at which none of the accepted tokens is among the drafter's m likeliest.

    A drafter closer than that is certain to have one of them. Infinite where no law misses all of them: fewer than m
    tokens are refused, or (reverse) have a probability.
    """
    pool, level, possible = _pool(p, accepted, m, reverse)
    if reverse:
        kl = -jnp.log1p(jnp.where(pool, level - p, 0.0).sum())
    else:
        kl = jnp.where(pool, _divergence(p, level), 0.0).sum()
    return jnp.where(possible, jnp.maximum(kl, 0.0), jnp.inf)


def nearest_rejected(
    p: Float[Array, "v"], accepted: Bool[Array, "v"], m: int = 1, reverse: bool = False
) -> Float[Array, "v"]:
    """The drafter's law at `kl_to_reject`, where m refused tokens tie with the accepted ones; NaN if there is none."""
    pool, level, possible = _pool(p, accepted, m, reverse)
    q = jnp.where(pool, level, p)
    return jnp.where(possible, q / q.sum(), jnp.nan)


def certified(
    p: Float[Array, "v"], q: Float[Array, "v"], accepted: Bool[Array, "v"], m: int = 1, reverse: bool = False
) -> Bool[Array, ""]:
    """Whether q is near enough to p for an accepted token to be among its m likeliest, by the certificate alone."""
    a, b = (q, p) if reverse else (p, q)
    return _divergence(a, b).sum() < kl_to_reject(p, accepted, m, reverse)


def margin_bound(margin: Float[Array, "*b"] | float, m: int = 1, reverse: bool = False) -> Float[Array, "*b"]:
    """The least `kl_to_reject` of all laws p with a given margin: p of the likeliest token less p of the m-th refused.

    Sharp for strict greedy (m = 1) and for a greedy token among the drafter's m likeliest; for larger accepted sets a
    lower bound still. The least law has m + 1 tokens, those between the extremes equal: forward it is a uniform law
    tilted by (y, 1, ..., 1, 1 / y), in reverse they are the harmonic mean of the extremes. For m = 1 that is
    ((1 + d) log(1 + d) + (1 - d) log(1 - d)) / 2 and -log(1 - d^2) / 2.
    """
    d, k = jnp.asarray(margin, jnp.float32), m - 1
    if reverse:
        both = (1 + jnp.sqrt(1 + k * (k + 2) * d * d)) / (k + 2)
        high, low = (both + d) / 2, (both - d) / 2
        middle = 2 * high * low / both
        return -(jnp.log(high) + jnp.log(low) + k * jnp.log(middle)) / (m + 1) - jnp.log(m + 1.0)
    log_y = jnp.log(k * d + jnp.sqrt(k * k * d * d + 4 * (1 - d * d))) - jnp.log(2 * (1 - d))
    log_total = jnp.logaddexp(jnp.logaddexp(log_y, -log_y), jnp.log(jnp.float32(k)))
    return jnp.where(d < 1, log_y * d - log_total + jnp.log(m + 1.0), jnp.log(m + 1.0))


def _divergence(a: Array, b: Array) -> Array:
    """a log(a / b) - a + b: none is negative, so nothing cancels when they are summed over two laws."""
    d = (a - b) / b
    inside = b * ((1 + d) * jnp.log1p(d) - d)
    return jnp.where(a > 0, jnp.where(b > 0, inside, jnp.inf), b)


def _pool(p: Array, accepted: Array, m: int, reverse: bool) -> tuple[Array, Array, Array]:
    """The tokens that share the level, the level, and whether any law misses the accepted tokens.

    The level balances what the accepted tokens lose and what the refused ones gain, in p or log p.
    """
    if not 1 <= m <= p.shape[0]:
        raise ValueError(f"m: got {m}, takes 1 .. {p.shape[0]}, the number of tokens")
    refused = jnp.zeros(p.shape, bool).at[lax.top_k(jnp.where(accepted, -1.0, p), m)[1]].set(True) & ~accepted
    possible = (refused.sum() == m) & ~(reverse & (refused & (p == 0)).any())
    t = jnp.log(jnp.maximum(p, 1e-37)) if reverse else p
    order = jnp.argsort(-t, stable=True)
    s, a, y = t[order], accepted[order], refused[order]
    above = jnp.cumsum(jnp.where(a, s, 0.0)) - jnp.cumsum(a) * s
    behind = lambda x: x.sum() - jnp.cumsum(x)  # noqa: E731
    below = behind(y) * s - behind(jnp.where(y, s, 0.0))
    last = jnp.max(jnp.where((a | y) & (above <= below), jnp.arange(p.shape[0]), -1))
    index = jnp.arange(p.shape[0])
    pooled = (a & (index <= last)) | (y & (index > last))
    level = jnp.where(pooled, s, 0.0).sum() / jnp.maximum(pooled.sum(), 1)
    pool = jnp.zeros(p.shape, bool).at[order].set(pooled)
    return pool, jnp.exp(level) if reverse else level, possible
