"""How far a drafter's law q is from the target's law p at one slot: pure functions over the last axis.

All take logits (of one vocabulary, see `vocabulary.restrict`), reduce the last axis and return nats, or a probability.
The target's side has no gradient. A token with the logit -inf has probability 0; where a divergence asks for the log of
that 0 it counts as `ZERO`, and passes no gradient, so that values and gradients stay finite for disjoint supports too.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

ZERO = -100.0
"""The log that stands for log 0, as in torch's binary cross-entropy."""

Divergence = Callable[[Float[Array, "*b v"], Float[Array, "*b v"]], Float[Array, "*b"]]


def log_law(logits: Float[Array, "*b v"]) -> Float[Array, "*b v"]:
    """Log-probabilities in float32, `ZERO` for a logit of -inf."""
    z = logits.astype(jnp.float32)
    return jnp.where(z > -jnp.inf, jax.nn.log_softmax(z, axis=-1), ZERO)


def cross_entropy(logits: Float[Array, "*b v"], labels: Int[Array, "*b"]) -> Float[Array, "*b"]:
    """-log q(label)."""
    return -jnp.take_along_axis(log_law(logits), labels[..., None], axis=-1)[..., 0]


def forward_kl(logits: Float[Array, "*b v"], target: Float[Array, "*b v"]) -> Float[Array, "*b"]:
    """KL(p || q) = sum of p (log p - log q): q covers what p has."""
    log_p = _fixed(target)
    return (_chance(target, log_p) * (log_p - log_law(logits))).sum(-1)


def reverse_kl(logits: Float[Array, "*b v"], target: Float[Array, "*b v"]) -> Float[Array, "*b"]:
    """KL(q || p) = sum of q (log q - log p): q keeps to where p has mass."""
    log_q = log_law(logits)
    return (_chance(logits, log_q) * (log_q - _fixed(target))).sum(-1)


def jensen_shannon(logits: Float[Array, "*b v"], target: Float[Array, "*b v"]) -> Float[Array, "*b"]:
    """(KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2."""
    log_q, log_p = log_law(logits), _fixed(target)
    log_m = jnp.logaddexp(log_q, log_p) - jnp.log(2.0)
    terms = _chance(target, log_p) * (log_p - log_m) + _chance(logits, log_q) * (log_q - log_m)
    return terms.sum(-1) / 2


def total_variation(logits: Float[Array, "*b v"], target: Float[Array, "*b v"]) -> Float[Array, "*b"]:
    """Half the sum of |p - q|: the chance that strict rejection sampling rejects a token drawn from q."""
    q, p = (_chance(z, log) for z, log in ((logits, log_law(logits)), (target, _fixed(target))))
    return jnp.abs(p - q).sum(-1) / 2


def l1(logits: Float[Array, "*b v"], target: Float[Array, "*b v"]) -> Float[Array, "*b"]:
    """The sum of |p - q|, twice the total variation: the term DSpark's loss has (arXiv 2607.05147)."""
    return 2 * total_variation(logits, target)


def log_overlap(logits: Float[Array, "*b v"], target: Float[Array, "*b v"]) -> Float[Array, "*b"]:
    """log alpha, alpha = sum of min(p, q) = 1 - TV: the log of the chance that a token drawn from q is accepted."""
    return jax.nn.logsumexp(jnp.minimum(log_law(logits), _fixed(target)), axis=-1)


def lk(logits: Float[Array, "*b v"], target: Float[Array, "*b v"]) -> Float[Array, "*b"]:
    """-log alpha (LK losses, arXiv 2602.23881)."""
    return -log_overlap(logits, target)


def lk_hybrid(
    logits: Float[Array, "*b v"], target: Float[Array, "*b v"], scale: float = 1.0, eta: float = 3.0
) -> Float[Array, "*b"]:
    """w KL(p || q) + (1 - w) (1 - alpha), with w = scale exp(-eta alpha) held fixed (LK losses, arXiv 2602.23881).

    KL leads while the laws are far apart, where 1 - alpha has little gradient. The default eta is ours.
    """
    alpha = jnp.exp(log_overlap(logits, target))
    weight = scale * jnp.exp(-eta * lax.stop_gradient(alpha))
    return weight * forward_kl(logits, target) + (1 - weight) * (1 - alpha)


NAMES: dict[str, Divergence] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jensen_shannon,
    "tv": total_variation,
    "l1": l1,
    "lk": lk,
    "lk_hybrid": lk_hybrid,
}


def _fixed(target: Array) -> Array:
    return lax.stop_gradient(log_law(target))


def _chance(logits: Array, log_law: Array) -> Array:
    """exp of the log-law, exactly 0 where the logit is -inf."""
    return jnp.where(logits > -jnp.inf, jnp.exp(log_law), 0.0)
