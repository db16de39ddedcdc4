"""The gated delta rule over a draft tree in XLA: the readable form, the oracle of the kernels, and what runs on CPU."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.gated_delta.factors import (
    Pending,
    Result,
    Staged,
    UnsupportedError,
    fold,
    gather,
    normed,
    per_head,
    sum_dtype,
)
from pallas_kernels.gated_delta.rows import Rows, depths, shield

__all__ = ["Pending", "Result", "Staged", "UnsupportedError", "fold", "gated_delta", "gather"]


def gated_delta(
    q: Float[Array, "b n hk dk"],
    k: Float[Array, "b n hk dk"],
    v: Float[Array, "b n hv dv"],
    decay: Float[Array, "b n hv *dk"],
    beta: Float[Array, "b n hv"] | None,
    mask: Bool[Array, "b n m"],
    state: Float[Array, "b hv dk dv"],
    pending: Pending | None = None,
    *,
    scale: float,
    q_norm: Float[Array, "b n hk"] | None = None,
    k_norm: Float[Array, "b n hk"] | None = None,
    staged: Staged | None = None,
    depth: int | None = None,
) -> Result:
    """See `api.gated_delta`. With float64 arrays all is float64.

    Products are made of batches of small matrices, over batch rows and heads as one dimension (see `tree_attention`).
    """
    dtype = sum_dtype(q, k, v, decay, state)
    stored = state if pending is None else fold(state, pending)
    base = stored.astype(dtype)
    depth = min(mask.shape[1], depth or mask.shape[1])
    rows = shield(q, k, v, decay, beta, mask, q_norm, k_norm, staged, depth)
    tree = inner(rows, mask, scale, depth, dtype)
    u_staged = None if rows.staged is None else rows.staged.u.astype(dtype)
    output, u = outer(tree, rows.v.swapaxes(1, 2).astype(dtype), base, u_staged)
    broken = rows.broken.swapaxes(1, 2)[..., None]
    output, u = (jnp.where(broken, jnp.nan, x) for x in (output, u))
    return Result(output.swapaxes(1, 2).astype(v.dtype), u, stored)


@struct.dataclass
class Tree:
    """All of a tree's part that does not depend on the state, per value head.

    q, k: the rows times the decay since the state, by which they read it. read: how node i's output reads u_j.
    carry: how u_i reads staged u_j. inverse: (I + L)^-1; None where no node has an ancestor, and without a delta rule.
    """

    q: Float[Array, "b hv n dk"]
    k: Float[Array, "b hv n dk"]
    read: Float[Array, "b hv n m"]
    carry: Float[Array, "b hv n s"] | None
    beta: Float[Array, "b hv n"] | None
    inverse: Float[Array, "b hv n n"] | None


def inner(rows: Rows, mask: Bool[Array, "b n m"], scale: float, depth: int, dtype: jnp.dtype) -> Tree:
    """Decays, products of keys, and the inverse of I + L: L_ij = beta_i exp(D_ij) k_i k_j for ancestors j."""
    heads, n, staged = rows.v.shape[2], mask.shape[1], rows.staged
    q = (normed(rows.q, rows.q_norm, dtype) * scale).swapaxes(1, 2)
    k = keys = normed(rows.k, rows.k_norm, dtype).swapaxes(1, 2)
    g = rows.decay.astype(dtype)
    if staged is not None:
        keys = jnp.concatenate([normed(staged.k, staged.k_norm, dtype).swapaxes(1, 2), k], axis=2)
        g = jnp.concatenate([staged.decay.astype(dtype), g], axis=1)
    total, between = decays(g, mask, trivial=depth == 1 and staged is None)
    pair = lambda x: products(x, keys, between, heads)  # noqa: E731
    read = jnp.where(mask[:, None], pair(q), 0)
    since = jnp.exp(total if total.ndim == 4 else total[..., None])
    entry = lambda x: per_head(x, heads) * since  # noqa: E731
    beta = None if rows.beta is None else rows.beta.swapaxes(1, 2).astype(dtype)
    if beta is None or (depth == 1 and staged is None):
        return Tree(entry(q), entry(k), read, None, beta, None)
    seen = jnp.where(mask[:, None], pair(k), 0)
    before = mask.shape[2] - n
    strict = jnp.where(jnp.eye(n, dtype=bool), 0, seen[..., before:])
    inverse = invert(beta[..., None] * strict, depths(mask), depth) if depth > 1 else None
    return Tree(entry(q), entry(k), read, seen[..., :before] if before else None, beta, inverse)


def outer(
    tree: Tree, v: Float[Array, "b hv n dv"], state: Float[Array, "b hv dk dv"], staged: Any = None
) -> tuple[Float[Array, "b hv n dv"], Float[Array, "b hv n dv"]]:
    """Outputs and u from the state and the staged rows u."""
    n = v.shape[2]
    out = product(tree.q, state)
    if tree.beta is None:
        u = v
    else:
        u = v - product(tree.k, state)
        if tree.carry is not None:
            u -= product(tree.carry, staged)
        u = tree.beta[..., None] * u
        if tree.inverse is not None:
            u = product(tree.inverse, u)
    before = tree.read.shape[-1] - n
    out += product(tree.read[..., before:], u)
    if before:
        out += product(tree.read[..., :before], staged)
    return out, u


def decays(g: Array, mask: Bool[Array, "b n m"], trivial: bool = False) -> tuple[Array, Array | None]:
    """Log decays [b, hv, n (, dk)] from the state to node i, and [b, hv, n, m (, dk)] from its ancestor j to it.

    D_ij is the sum over those of i's ancestors that are neither j nor j's: never positive, and free of the cancellation
    of G_i - G_j. A staged node's ancestors are not in the mask, but of nodes on one path the later one is the deeper.
    """
    a = mask.astype(g.dtype)
    n, m = mask.shape[1:]
    channel = "c" if g.ndim == 4 else ""
    total = jnp.einsum(f"bim,bmh{channel}->bhi{channel}", a, g, precision="highest")
    if trivial:
        return total, None
    later = jnp.tri(m, m - n, -1, dtype=g.dtype)  # [m, j]: m > j
    apart = jnp.concatenate([jnp.broadcast_to(later, (len(a), m, m - n)), 1 - a.swapaxes(1, 2)], axis=2)
    if channel:
        between = jnp.einsum("bim,bmj,bmhc->bhijc", a, apart, g, precision="highest")
    else:
        between = jnp.einsum("bhim,bmj->bhij", a[:, None] * g.swapaxes(1, 2)[:, :, None], apart, precision="highest")
    return total, between


def products(x: Array, keys: Array, between: Array | None, heads: int) -> Float[Array, "b hv n m"]:
    """x_i k_j exp(D_ij), per channel where the decay is."""
    if between is not None and between.ndim == 5:
        x, keys = per_head(x, heads), per_head(keys, heads)
        return jnp.einsum("bhic,bhijc,bhjc->bhij", x, jnp.exp(between), keys, precision="highest")
    dots = per_head(product(x, keys.swapaxes(2, 3)), heads)
    return dots if between is None else dots * jnp.exp(between)


def invert(lower: Float[Array, "b hv n n"], depth_of: Int[Array, "b n"], depth: int) -> Float[Array, "b hv n n"]:
    """(I + L)^-1 for an L between nodes and their ancestors, by bisection of depths.

    After step s, T inverts I + L of the pairs within a block of 2s depths: the inverse of [[A, 0], [C, B]] is
    [[A^-1, 0], [-B^-1 C A^-1, B^-1]]. Nothing ever grows beyond inverses of subtrees, as powers of L do.
    """
    t = jnp.broadcast_to(jnp.eye(lower.shape[-1], dtype=lower.dtype), lower.shape)
    row, column = depth_of[:, None, :, None], depth_of[:, None, None, :]
    size = 1
    while size < depth:
        pairs = (row // (2 * size) == column // (2 * size)) & (row // size % 2 == 1) & (column // size % 2 == 0)
        part = jnp.where(pairs, lower, 0)
        t = t - (part if size == 1 else product(product(t, part), t))
        size *= 2
    return t


def product(a: Array, b: Array) -> Array:
    """Products of matrices, in float32 proper on every chip; all batch dimensions as one."""
    flat = lambda x: x.reshape(-1, *x.shape[-2:])  # noqa: E731
    out = jnp.einsum("gij,gjk->gik", flat(a), flat(b), precision="highest")
    return out.reshape(*a.shape[:-1], b.shape[-1])
