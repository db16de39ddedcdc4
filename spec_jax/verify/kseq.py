"""SpecTr K-SEQ: every sibling is tried against the same p, with q made larger so that none is accepted too often."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array

from spec_jax import noise
from spec_jax.sampling import reduce
from spec_jax.tree import Draft
from spec_jax.verify.scores import Scores
from spec_jax.verify.siblings import Siblings, least, walk
from spec_jax.verify.verdict import Verdict


def kseq(key: noise.Key, draft: Draft, scores: Scores, m: int) -> Verdict:
    """Accept the first of k siblings that passes min(1, p / (rho q)); else draw from what that leaves of p.

    A sibling passes with probability beta = sum(min(q, p / rho)), some sibling with 1 - (1 - beta)^k, so the accepted
    token has the mass c min(q, p / rho) with c = (1 - (1 - beta)^k) / beta. rho is the least number in [1, k] for which
    this nowhere exceeds p, c <= rho, found by bisection; the residual is p less that mass. The chance of acceptance is
    at least 1 - 1/e of the best possible with these candidates (`audit.transport`).

    Raises:
        ValueError: if the draft's siblings are not independent draws from a law ("sampled").

    Source: Sun et al., SpecTr, arXiv 2310.15141, algorithm 3 (K-SEQ) and theorem 2.
    """
    return walk(key, draft, scores, m, _decide)


def _decide(s: Siblings) -> tuple[Array, Array]:
    k = s.k.astype(jnp.float32)

    def scale(rho: Array) -> Array:
        beta = jnp.minimum(reduce.total(jnp.minimum(s.q, s.p / rho)), 1.0)
        return jnp.where(beta > 0, -jnp.expm1(k * jnp.log1p(-beta)) / beta, k)

    rho = least(lambda rho: scale(rho) <= rho, jnp.float32(1), jnp.maximum(k, 1), s.k > 1)
    q = s.q[s.tokens]
    child = s.first((q > 0) & (s.u * rho * q < s.p[s.tokens]))
    return child, jnp.maximum(s.p - scale(rho) * jnp.minimum(s.q, s.p / rho), 0.0)
