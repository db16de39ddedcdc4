"""How rows that hold no numbers are kept from those that don't see them: 0 times NaN is NaN in a matrix product."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.gated_delta.factors import LEAST_DECAY, Staged


@struct.dataclass
class Rows:
    """The arrays of a call in which every row is finite, and which rows must come out as NaN instead.

    q alone may still hold NaN: no other row reads it.
    """

    q: Float[Array, "b n hk dk"]
    k: Float[Array, "b n hk dk"]
    v: Float[Array, "b n hv dv"]
    decay: Float[Array, "b n hv *dk"]
    beta: Float[Array, "b n hv"] | None
    q_norm: Float[Array, "b n hk"] | None
    k_norm: Float[Array, "b n hk"] | None
    staged: Staged | None
    broken: Bool[Array, "b n hv"]


def shield(q, k, v, decay, beta, mask, q_norm, k_norm, staged: Staged | None, depth: int) -> Rows:
    """Unused rows and rows with a NaN or an infinity set to zero; `broken` marks the latter and all that see them.

    A node deeper than `depth` says is broken as well: a solve of that depth would be wrong for it. A decay of -inf is a
    number: the state is forgotten.
    """
    used = mask.any(-1)[..., None]
    heads = v.shape[2]
    good_k, good, decay = _finite(k, k_norm, v, decay, beta)
    k, k_norm, v, decay, beta = _zeroed(used & good_k, used & good, k, k_norm, v, decay, beta)
    q = jnp.where(used[..., None], q, 0)
    q_norm = None if q_norm is None else jnp.where(used, q_norm, 0)
    if staged is not None:
        u = staged.u.swapaxes(1, 2)
        seen = mask[..., : u.shape[1]].any(1)[..., None]
        good_k, fine, g = _finite(staged.k, staged.k_norm, u, staged.decay, None)
        sk, s_norm, u, g, _ = _zeroed(seen & good_k, seen & fine, staged.k, staged.k_norm, u, g, None)
        staged = Staged(sk, s_norm, u.swapaxes(1, 2), g)
        good = jnp.concatenate([fine, good], axis=1)
    assert good.shape[1:] == (mask.shape[2], heads)
    broken = (mask[..., None] & ~good[:, None]).any(2)
    broken |= (depths(mask) >= depth)[..., None]
    return Rows(q, k, v, decay, beta, q_norm, k_norm, staged, broken)


def depths(mask: Bool[Array, "b n m"]) -> Int[Array, "b n"]:
    """How many ancestors each node has among the nodes of this call."""
    own = mask[..., mask.shape[2] - mask.shape[1] :]
    return jnp.maximum(own.sum(-1, dtype=jnp.int32) - 1, 0)


def _finite(k, k_norm, v, decay, beta) -> tuple[Any, ...]:
    decay = jnp.maximum(decay, LEAST_DECAY)
    good_k = jnp.isfinite(k).all(-1) if k_norm is None else jnp.isfinite(k).all(-1) & jnp.isfinite(k_norm)
    good = jnp.isfinite(v).all(-1) & jnp.repeat(good_k, v.shape[2] // k.shape[2], axis=2)
    good &= jnp.isfinite(decay) if decay.ndim == 3 else jnp.isfinite(decay).all(-1)
    return good_k, good if beta is None else good & jnp.isfinite(beta), decay


def _zeroed(keep_k, keep, k, k_norm, v, decay, beta) -> tuple[Any, ...]:
    per_row = lambda x, keep: None if x is None else jnp.where(keep if x.ndim == 3 else keep[..., None], x, 0)  # noqa: E731
    return per_row(k, keep_k), per_row(k_norm, keep_k), per_row(v, keep), per_row(decay, keep), per_row(beta, keep)
