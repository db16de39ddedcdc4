"""Residual-aware siblings: each is accepted only for the part of p that the siblings after it could not cover."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from spec_jax import noise
from spec_jax.sampling import reduce
from spec_jax.tree import Draft
from spec_jax.verify.scores import Scores
from spec_jax.verify.siblings import Siblings, least, walk
from spec_jax.verify.verdict import Verdict


def resispec(key: noise.Key, draft: Draft, scores: Scores, m: int) -> Verdict:
    """Try k siblings in turn, with the proposal reshaped so that a residual stays where the drafter is confident.

    The plain rule takes min(p, q) with the first sibling; what it leaves of p is where q is low, and later draws from q
    miss it ("residual drift"). Here sibling i is reached with probability S_i and takes, of p, only what exceeds
    q (S_i+1 + .. + S_k), all that later siblings can cover: it is accepted with

        min(1, max(p - tau_i q, 0) / (S_i q)),    tau_i = S_i+1 + .. + S_k.

    So together they take min(p, rho q) with rho = S_1 + .. + S_k, and the residual is max(p - rho q, 0). S_1 = 1 and
    S_i+1 = 1 - sum(min(p, rho q)) + sum(min(p, tau_i q)) follow from rho, which is found by bisection. No rule that
    tries independent siblings one after another accepts more often; `rejection` and `kseq` are among them.

    Raises:
        ValueError: if the draft's siblings are not independent draws from a law ("sampled").

    Source: ResiSpec names the residual drift and reshapes the proposal while verifying. Its formulas are not in its
    abstract; the rule above is our own, derived from that aim: the best of its kind, and exact.
    """
    return walk(key, draft, scores, m, _decide)


def _decide(s: Siblings) -> tuple[Array, Array]:
    n = s.tokens.shape[0]

    def covered(tau: Array) -> Array:
        return reduce.total(jnp.minimum(s.p, jnp.maximum(tau, 0.0) * s.q))

    def plan(rho: Array) -> tuple[Array, Array, Array]:
        """By rank among the siblings: S and tau; and tau behind the last one, which is not used."""
        missed = reduce.total(jnp.maximum(s.p - rho * s.q, 0.0))

        def sibling(i, carry):
            reached, taus, tau = carry
            here = jnp.where(i == 0, 1.0, missed + covered(tau))
            return reached.at[i].set(here), taus.at[i].set(jnp.maximum(tau - here, 0.0)), tau - here

        return lax.fori_loop(0, s.k, sibling, (jnp.zeros(n), jnp.zeros(n), rho))

    high = jnp.maximum(s.k, 1).astype(jnp.float32)
    rho = least(lambda rho: plan(rho)[2] >= 0, jnp.float32(1), high, s.k > 1)
    reached, taus, unused = plan(rho)
    rank = jnp.cumsum(s.here) - 1
    p, q = s.p[s.tokens], s.q[s.tokens]
    kept = (q > 0) & (s.u * reached[rank] * q < p - taus[rank] * q)
    rest = jnp.maximum(s.p - rho * s.q, 0.0) + jnp.minimum(s.p, jnp.maximum(unused, 0.0) * s.q)
    return s.first(kept), rest
