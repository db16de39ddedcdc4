"""The gated delta rule over a draft tree as a Pallas-Triton kernel: each program owns some value columns of one head.

It reads its columns of the state once, folds the pending rows in, writes them once, and solves for its columns of u.
The node x node part (decays, products of keys, the inverse) does not depend on the columns, so the programs of a head
repeat it: that costs arithmetic and reads of q and k that the L2 cache serves, where one program per head would leave
most multiprocessors idle for a few sequences, and a kernel of its own would write and read the inverse.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float

from pallas_kernels.gated_delta.factors import Pending, Result, Staged, UnsupportedError, check_dtypes
from pallas_kernels.gated_delta.rows import Rows, shield

_PROGRAMS = 132  # at most one for each of an H100's multiprocessors, where columns are shared out for more programs
_MOST_ROWS = 128
_REFINEMENTS = 2


@dataclasses.dataclass(frozen=True)
class Config:
    """Value columns per program and channels of the keys per step: powers of two from 16 that divide dv and dk."""

    columns: int
    channels: int
    warps: int = 4
    stages: int = 1

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name in ("columns", "channels"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"config: got {name} {size}, takes a power of two from 16")


def heuristic(b: int, n: int, hv: int, dk: int, dv: int) -> Config:
    """The Config for b sequences of n nodes: as many columns as registers hold while there are programs enough."""
    columns, channels = _divisor(dv, 64 if n <= 64 else 32), _divisor(dk, 64 if n <= 64 else 32)
    while columns > 16 and 2 * b * hv * (dv // columns) <= _PROGRAMS:
        columns //= 2
    return Config(columns, channels, 4 if n <= 32 else 8)


def gated_delta(
    q: Float[Array, "b n hk dk"],
    k: Float[Array, "b n hk dk"],
    v: Float[Array, "b n hv dv"],
    decay: Float[Array, "b n hv"],
    beta: Float[Array, "b n hv"] | None,
    mask: Bool[Array, "b n n"],
    state: Float[Array, "b hv dk dv"],
    pending: Pending | None = None,
    *,
    scale: float,
    q_norm: Float[Array, "b n hk"] | None = None,
    k_norm: Float[Array, "b n hk"] | None = None,
    staged: Staged | None = None,
    depth: int | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Result:
    """See `api.gated_delta`. With pending rows the state is updated in place where the caller donates it.

    Tensor cores multiply bfloat16, so a float32 array is taken as a sum of three and errors are float32's; I + L is
    inverted in single passes, and the solution is refined twice, each time multiplying its error by the inverse's.

    Raises UnsupportedError for a decay per channel, for staged rows, more than 128 nodes or pending rows, and heads
    that are no multiple of 16.
    """
    if staged is not None:
        raise UnsupportedError("staged: got rows of earlier nodes, pallas_gpu scores a tree in one call; use 'xla'")
    if decay.ndim == 4:
        raise UnsupportedError("decay: got one per channel, pallas_gpu takes one per head; use 'xla'")
    check_dtypes("pallas_gpu", q=q, k=k, v=v, state=state)
    if pending is not None:
        check_dtypes("pallas_gpu", **{"pending.k": pending.k, "pending.u": pending.u})
    b, n, hk, dk = q.shape
    hv, dv = v.shape[2:]
    for name, size in (("q", dk), ("v", dv)):
        if size % 16:
            raise UnsupportedError(f"{name}: got heads of {size}, which pallas_gpu cannot tile: takes multiples of 16")
    p = 0 if pending is None else pending.k.shape[1]
    for name, size in (("q", n), ("pending", p)):
        if size > _MOST_ROWS:
            raise UnsupportedError(f"{name}: got {size} rows, pallas_gpu holds at most {_MOST_ROWS}; use 'xla'")
    nodes, depth = _power(n), min(n, depth or n)
    config = config or heuristic(b, nodes, hv, dk, dv)
    if dv % config.columns or dk % config.channels:
        raise ValueError(f"config: got {config}, takes columns that divide {dv} and channels that divide {dk}")
    rows = shield(q, k, v, decay, beta, mask, q_norm, k_norm, None, depth)

    of_head = lambda *shape: pl.BlockSpec((None, None, *shape), lambda c, i: (i // hv, i % hv, *(0 for _ in shape)))  # noqa: E731
    of_key = lambda size: pl.BlockSpec(  # noqa: E731
        (None, None, size, dk), lambda c, i: (i // hv, i % hv // (hv // hk), 0, 0)
    )
    columns = lambda size: pl.BlockSpec((None, None, size, config.columns), lambda c, i: (i // hv, i % hv, 0, c))  # noqa: E731
    tree = pl.BlockSpec((None, nodes, nodes), lambda c, i: (i // hv, 0, 0))
    operands = [_pad(_pad(mask, 1, nodes), 2, nodes), *_scalars(rows, scale, nodes)]
    in_specs = [tree, *(of_head(nodes) for _ in operands[1:])]
    operands += [_pad(x.swapaxes(1, 2), 2, nodes) for x in (rows.q, rows.k, rows.v)] + [state]
    in_specs += [of_key(nodes), of_key(nodes), columns(nodes), columns(dk)]
    out_shape = [
        jax.ShapeDtypeStruct((b, hv, nodes, dv), v.dtype),
        jax.ShapeDtypeStruct((b, hv, nodes, dv), jnp.float32),
    ]
    out_specs, aliases = [columns(nodes), columns(nodes)], {}
    if pending is not None:
        aliases = {len(operands) - 1: 2}
        kept, keys, u = _pending(pending, hv, _power(p))
        operands += [kept, keys, u]
        in_specs += [of_head(1), of_key(_power(p)), columns(_power(p))]
        out_shape.append(jax.ShapeDtypeStruct(state.shape, state.dtype))
        out_specs.append(columns(dk))
    output, u, *folded = pl.pallas_call(
        functools.partial(_kernel, depth=depth, delta=beta is not None, channels=config.channels),
        grid=(dv // config.columns, b * hv),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        input_output_aliases=aliases,
        compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=interpret,
        name="gated_delta",
    )(*operands)
    broken = rows.broken.swapaxes(1, 2)[..., None]
    output, u = (jnp.where(broken, jnp.nan, x[:, :, :n]) for x in (output, u))
    return Result(output.swapaxes(1, 2), u, folded[0] if folded else state)


def bytes_moved(q: Any, v: Any, state: Any, pending: Any = None, *, config: Config | None = None) -> int:
    """Bytes that all programs read and write, hits of the L2 cache among them; arrays (or ShapeDtypeStructs)."""
    b, n, _, dk = q.shape
    hv, dv = v.shape[2:]
    nodes = _power(n)
    config = config or heuristic(b, nodes, hv, dk, dv)
    programs = dv // config.columns
    per_program = nodes * nodes + 4 * nodes * 4 + 2 * nodes * dk * q.dtype.itemsize
    moved = nodes * dv * (2 * v.dtype.itemsize + 4) + dk * dv * state.dtype.itemsize
    if pending is not None:
        size = _power(pending.k.shape[1])
        per_program += size * dk * pending.k.dtype.itemsize + 4
        moved += size * dv * 4 + dk * dv * state.dtype.itemsize
    return b * hv * (programs * per_program + moved)


def _scalars(rows: Rows, scale: float, nodes: int) -> list[Array]:
    """Each node's decay, beta, key norm, and query norm times scale, per value head."""
    b, n, hv = rows.decay.shape
    ones = jnp.ones((b, n, hv), jnp.float32)
    per_head = lambda x: ones if x is None else jnp.repeat(x, hv // x.shape[2], axis=2)  # noqa: E731
    numbers = (rows.decay, per_head(rows.beta), per_head(rows.k_norm), scale * per_head(rows.q_norm))
    return [_pad(x.swapaxes(1, 2).astype(jnp.float32), 2, nodes) for x in numbers]


def _pending(pending: Pending, hv: int, size: int) -> list[Array]:
    """The state's own weight; keys; and rows of u times their weights and key norms. Rows of weight 0 are zero."""
    weight, keys, hk = pending.weight.astype(jnp.float32), pending.k, pending.k.shape[2]
    shown = weight != 0
    if pending.k_norm is not None:
        weight *= jnp.repeat(pending.k_norm.astype(jnp.float32).swapaxes(1, 2), hv // hk, axis=1)
    u = jnp.where(shown[..., None], weight[..., None] * pending.u.astype(jnp.float32), 0)
    of_key = shown.reshape(len(shown), hk, hv // hk, -1).any(2)
    keys = jnp.where(of_key[..., None], keys.swapaxes(1, 2), 0)
    return [jnp.exp(pending.decay.astype(jnp.float32))[..., None], _pad(keys, 2, size), _pad(u, 2, size)]


def _kernel(
    mask_ref, decay_ref, beta_ref, k_norm_ref, q_scale_ref, q_ref, k_ref, v_ref, state_ref, *refs: Any,
    depth, delta, channels,
):  # fmt: skip
    *pending, out_ref, u_ref = refs if len(refs) == 2 else refs[:-1]
    n, dk = q_ref.shape
    nothing = lambda width: jnp.zeros((n, width), jnp.float32)  # noqa: E731
    q_dots, k_dots, q_reads, k_reads = nothing(n), nothing(n), nothing(v_ref.shape[1]), nothing(v_ref.shape[1])
    for start in range(0, dk, channels):
        at = pl.ds(start, channels)
        q, k, state = q_ref[:, at], k_ref[:, at], state_ref[at, :]
        if pending:
            kept_ref, pending_k_ref, pending_u_ref = pending
            new = kept_ref[0] * state.astype(jnp.float32) + _dot(pending_k_ref[:, at], pending_u_ref[...], 0, 0)
            state = new.astype(state.dtype)
            refs[-1][at, :] = state
        q_dots, q_reads = q_dots + _dot(q, k, 1, 1), q_reads + _dot(q, state)
        if delta:
            k_dots, k_reads = k_dots + _dot(k, k, 1, 1), k_reads + _dot(k, state)

    mask, decay, k_norm, q_scale = mask_ref[...], decay_ref[...], k_norm_ref[...], q_scale_ref[...]
    seen = mask.astype(jnp.float32)
    gates = seen * decay[None, :]
    since = jnp.exp(gates.sum(1))[:, None]
    between = jnp.where(mask, jnp.exp(_dot(gates, (1 - seen).astype(jnp.bfloat16), 1, 1)), 0.0) * k_norm[None, :]
    u = v_ref[...].astype(jnp.float32)
    if delta:
        beta = beta_ref[...][:, None]
        u = beta * (u - since * k_norm[:, None] * k_reads)
        if depth > 1:
            u = _solve(beta * k_norm[:, None] * k_dots * between, u, seen.sum(1).astype(jnp.int32) - 1, depth)
    out = q_scale[:, None] * (since * q_reads + _dot(q_dots * between, u))
    out_ref[...], u_ref[...] = out.astype(out_ref.dtype), u


def _solve(lower: Array, rhs: Array, level: Array, depth: int) -> Array:
    """(I + L)^-1 rhs for what of `lower` is between different depths, by bisection (see `reference.invert`)."""
    row, column = level[:, None], level[None, :]
    lower = jnp.where(row != column, lower, 0.0)
    node = jnp.arange(lower.shape[0])
    inverse = jnp.where(node[:, None] == node[None, :], 1.0, 0.0)
    for bit in range((depth - 1).bit_length()):
        within = (row >> (bit + 1) == column >> (bit + 1)) & (row >> bit != column >> bit)
        part = jnp.where(within, lower, 0.0)
        inverse = inverse - (part if bit == 0 else _pass(_pass(inverse, part), inverse))
    out = _pass(inverse, rhs)
    for _ in range(_REFINEMENTS):
        out = out + _pass(inverse, rhs - out - _dot(lower, out))
    return out


def _pass(a: Array, b: Array) -> Array:
    return _dot(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16))


def _dot(a: Array, b: Array, a_axis: int = 1, b_axis: int = 0) -> Array:
    """The product over these axes, in explicit bfloat16 passes, added in float32, the smallest first.

    Of the products of a float32 array's three terms those are left out that are below float32's resolution.
    """
    dims = (((a_axis,), (b_axis,)), ((), ()))
    terms = [(i + j, x, y) for i, x in enumerate(_split(a)) for j, y in enumerate(_split(b)) if i + j < 3]
    products = [
        lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)
        for _, x, y in sorted(terms, key=lambda term: -term[0])
    ]
    return functools.reduce(jnp.add, products)


def _split(x: Array) -> list[Array]:
    if x.dtype == jnp.bfloat16:
        return [x]
    terms = []
    for _ in range(3):
        terms.append(x.astype(jnp.bfloat16))
        x = x - terms[-1].astype(jnp.float32)
    return terms


def _divisor(size: int, most: int) -> int:
    """The greatest power of two that divides a size, up to `most`."""
    return min(size & -size, most)


def _power(x: int) -> int:
    """The least power of two from x, and at least 16, a tensor core's tile."""
    return max(16, 1 << (x - 1).bit_length())


def _pad(x: Array, axis: int, size: int) -> Array:
    """Zeros behind x along an axis, up to a size."""
    return jnp.pad(x, [(0, size - x.shape[i] if i == axis else 0) for i in range(x.ndim)])
