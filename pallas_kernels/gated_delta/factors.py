"""The factors that stand for states: staged rows of scored nodes, and the accepted path that is not yet folded in.

A recurrent state is a sum of outer products, so that node i's state is exp(G_i) S + sum_j exp(G_i - G_j) k_j u_j^T
over its ancestors j: a row of k and one of u per node take the place of a matrix per node.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.tree_attention.blocks import UnsupportedError, check_dtypes

__all__ = ["Pending", "Result", "Staged", "UnsupportedError", "check_dtypes", "fold", "gather", "leading"]

# exp of this is 0 in float32 and float64, so that a lower gate, -inf too, changes nothing; sums of it stay finite.
LEAST_DECAY = -1000.0


@struct.dataclass
class Result:
    """Outputs (v's dtype), the rows u to stage (float32), and the state with the pending rows folded in."""

    output: Float[Array, "b n hv dv"]
    u: Float[Array, "b hv n dv"]
    state: Float[Array, "b hv dk dv"]


@struct.dataclass
class Staged:
    """Rows of scored nodes: raw keys, their norms (None: 1), u, and each node's log decay (per head or channel)."""

    k: Float[Array, "b m hk dk"]
    k_norm: Float[Array, "b m hk"] | None
    u: Float[Array, "b hv m dv"]
    decay: Float[Array, "b m hv *dk"]


@struct.dataclass
class Pending:
    """An accepted path that the state lacks: S <- exp(decay) S + sum_j weight_j (k_norm_j k_j) u_j^T.

    Rows of weight 0 may hold anything; weight 0 and decay 0 mean that nothing was accepted.
    """

    k: Float[Array, "b p hk dk"]
    k_norm: Float[Array, "b p hk"] | None
    u: Float[Array, "b hv p dv"]
    weight: Float[Array, "b hv p *dk"]
    decay: Float[Array, "b hv *dk"]


def gather(staged: Staged, path: Int[Array, "b p"], length: Int[Array, "b"]) -> Pending:
    """The first `length` nodes of each row's root path as pending rows.

    path holds node indices, the root first; entries from `length` on may be any number. Length 0 accepts nothing.
    """
    path = jnp.clip(path, 0, staged.k.shape[1] - 1)

    def taken(x: Array, axis: int) -> Array:
        along = (path.shape[1] if i == axis else 1 for i in range(1, x.ndim))
        return jnp.take_along_axis(x, path.reshape(len(path), *along), axis)

    k_norm = None if staged.k_norm is None else taken(staged.k_norm, 1)
    return leading(Staged(taken(staged.k, 1), k_norm, taken(staged.u, 2), taken(staged.decay, 1)), length)


def leading(staged: Staged, length: Int[Array, "b"]) -> Pending:
    """The first `length` staged rows, each the child of the one before, as pending rows."""
    accepted = jnp.arange(staged.k.shape[1]) < length[:, None]

    def kept(x: Array, axis: int) -> Array:
        along = (accepted.shape[1] if i == axis else 1 for i in range(1, x.ndim))
        return jnp.where(accepted.reshape(len(x), *along), x, 0)

    upto_end = lax.cumsum(kept(jnp.maximum(staged.decay, LEAST_DECAY), 1), axis=1, reverse=True)
    behind = jnp.concatenate([upto_end[:, 1:], jnp.zeros_like(upto_end[:, :1])], axis=1)
    weight = kept(jnp.exp(behind), 1).swapaxes(1, 2)
    k_norm = None if staged.k_norm is None else kept(staged.k_norm, 1)
    return Pending(kept(staged.k, 1), k_norm, kept(staged.u, 2), weight, upto_end[:, 0])


def fold(state: Float[Array, "b hv dk dv"], pending: Pending) -> Float[Array, "b hv dk dv"]:
    """The state with the pending rows in it, in the state's dtype; sums are float32, or float64 for such arrays."""
    return folded(state, pending).astype(state.dtype)


def folded(state: Float[Array, "b hv dk dv"], pending: Pending) -> Float[Array, "b hv dk dv"]:
    """`fold` before it rounds to the state's dtype."""
    dtype = sum_dtype(state, pending.k, pending.u)
    b, heads, dk, dv = state.shape
    per_channel = pending.decay.ndim == 3
    weight = pending.weight.astype(dtype) if per_channel else pending.weight.astype(dtype)[..., None]
    shown = (weight != 0).any(-1, keepdims=True)
    keys = per_head(normed(pending.k, pending.k_norm, dtype).swapaxes(1, 2), heads)
    keys = jnp.where(shown, keys, 0) * weight
    u = jnp.where(shown, pending.u, 0).astype(dtype)
    decay = pending.decay.astype(dtype)[..., None] if per_channel else pending.decay.astype(dtype)[..., None, None]
    kept = jnp.exp(decay) * state.astype(dtype)
    if keys.shape[2] == 1:
        return kept + keys[:, :, 0, :, None] * u[:, :, 0, None, :]
    keys, u = keys.reshape(b * heads, -1, dk), u.reshape(b * heads, -1, dv)
    return kept + jnp.einsum("gpk,gpv->gkv", keys, u, precision="highest").reshape(state.shape)


def sum_dtype(*arrays: Array) -> jnp.dtype:
    """The dtype of sums: float64 if an array is, otherwise float32."""
    return jnp.result_type(jnp.float32, *arrays)


def normed(x: Float[Array, "b n h d"], norm: Float[Array, "b n h"] | None, dtype: jnp.dtype) -> Array:
    """Rows times their norms."""
    x = x.astype(dtype)
    return x if norm is None else x * norm.astype(dtype)[..., None]


def per_head(x: Float[Array, "b hk *rest"], heads: int) -> Float[Array, "b hv *rest"]:
    """Key heads as value heads see them: head h of `heads` uses key head h // (heads // hk)."""
    return jnp.repeat(x, heads // x.shape[1], axis=1)
