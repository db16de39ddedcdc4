"""The gated delta rule over a draft tree as a Pallas TPU kernel: the state is read once, and written once if pending.

One program has some heads of one sequence. Value heads go through in packs of as many as their node x node matrices
fit beside each other in 128 lanes, and every step is taken for all packs before the next, so that none waits alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from pallas_kernels.gated_delta.factors import Pending, Result, Staged, UnsupportedError, check_dtypes
from pallas_kernels.gated_delta.rows import Rows, depths, shield
from pallas_kernels.gated_delta.tpu_kernel import COLUMNS, kernel
from pallas_kernels.gated_delta.tpu_passes import LANES
from pallas_kernels.traffic import dma_bytes

Precision = Literal["high", "exact"]

_SUBLANES = 8
_MOST_NODES = 128
_MOST_PACKED = 4  # packs of more heads are fewer, and the MXUs are four
_BUDGET = 12 * 2**20  # of the 16 MiB that a kernel has without asking, on v5e; the rest is left to the compiler


@dataclasses.dataclass(frozen=True)
class Config:
    """Key heads per program (divides their number), each with all value heads that use it."""

    heads: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call is laid out: rows padded, heads per program, value heads per pack, and the grid with its blocks."""

    nodes: int
    pending: int
    heads: int
    group: int
    pack: int
    spec: pl.GridSpec

    @property
    def packs(self) -> list[range]:
        """The value heads of each pack."""
        return [range(h, h + self.pack) for h in range(0, self.heads * self.group, self.pack)]


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
    precision: Precision = "high",
    config: Config | None = None,
    interpret: Any = False,
) -> Result:
    """See `api.gated_delta`. With pending rows the state is updated in place where the caller donates it.

    precision: the MXU multiplies bfloat16, so a float32 array is taken as a sum of bfloat16 ones, two in "high" (errors
    near 1e-5 of the largest entry) and three in "exact" (near float32's, at more than twice the cost). "high" inverts
    I + L in single bfloat16 passes and refines the inverse once, which squares its error. A bfloat16 array is its own
    and only term, so raw q and k with norms are both faster and nearer than float32 rows.

    Raises UnsupportedError for a decay per channel, for staged rows, and for more nodes or larger heads than fit.
    """
    if precision not in ("high", "exact"):
        raise ValueError(f"precision: got {precision!r}, takes 'high' or 'exact'")
    if staged is not None:
        raise UnsupportedError("staged: got rows of earlier nodes, pallas_tpu scores a tree in one call; use 'xla'")
    if decay.ndim == 4:
        raise UnsupportedError(
            "decay: got one per channel, pallas_tpu takes one per head (its products of keys are made for all channels "
            "at once); use 'xla'"
        )
    check_dtypes("pallas_tpu", q=q, k=k, v=v, state=state)
    if pending is not None:
        check_dtypes("pallas_tpu", **{"pending.k": pending.k, "pending.u": pending.u})
    b, n, _, dk = q.shape
    heads, dv = v.shape[2:]
    p = plan(q, v, state, pending, config=config)
    depth = min(n, depth or n)
    rows = shield(q, k, v, decay, beta, mask, q_norm, k_norm, None, depth)
    tree = _tree(_pad(_pad(mask, 1, p.nodes), 2, p.nodes), p.pack)
    flat = lambda x: _pad(x.reshape(b, n, -1), 1, p.nodes)  # noqa: E731
    asked = [flat(x.astype(jnp.result_type(q, k))) for x in (rows.q, rows.k)]
    operands = [*tree, *_scalars(rows, scale, p), *asked, flat(rows.v), state]
    aliases = {}
    if pending is not None:
        aliases = {len(operands) - 1: 2}
        operands += _pending(pending, p)
    nodes = p.nodes
    outputs = [
        jax.ShapeDtypeStruct((b, nodes, heads * dv), v.dtype),
        jax.ShapeDtypeStruct((b, heads, nodes, dv), jnp.float32),
        jax.ShapeDtypeStruct(state.shape, state.dtype),
    ]
    result = pl.pallas_call(
        functools.partial(kernel, plan=p, depth=depth, delta=beta is not None, terms=2 if precision == "high" else 3),
        grid_spec=p.spec,
        out_shape=outputs[: 2 + (pending is not None)],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=4 * b * heads * nodes * (dk + nodes) * dv,
            transcendentals=b * heads * nodes * nodes,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*operands, *outputs[: 2 + (pending is not None)])),
        ),
        interpret=interpret,
        name="gated_delta",
    )(*operands)
    output = result[0][:, :n].reshape(v.shape)
    return Result(output, result[1][:, :, :n], state if pending is None else result[2])


def plan(q: Any, v: Any, state: Any, pending: Any = None, *, config: Config | None = None) -> Plan:
    """The layout for arrays (or ShapeDtypeStructs) as `gated_delta` takes them; raises as it does.

    The grid is (sequence, group of heads). The operands: the tree (three arrays), scalars of the nodes by column and by
    row, q, k, v, state; with pending rows their scalars, keys and u.
    """
    b, n, hk, dk = q.shape
    hv, dv = v.shape[2:]
    group, nodes = hv // hk, _up(n, 2 * _SUBLANES)
    if nodes > _MOST_NODES:
        raise UnsupportedError(f"q: got {n} nodes, pallas_tpu takes at most {_MOST_NODES}; use 'xla'")
    rows = 0 if pending is None else _up(pending.k.shape[1], _SUBLANES)
    sizes = [q.dtype.itemsize, v.dtype.itemsize, state.dtype.itemsize]
    heads = (config or heuristic(nodes, rows, hk, group, dk, dv, sizes)).heads
    if heads < 1 or hk % heads or (heads < hk and (heads * dk % LANES or heads * group * dv % LANES)):
        raise ValueError(
            f"config: got {heads} heads, takes a divisor of {hk} that makes blocks of {dk} and {group} x {dv} columns "
            f"per head a multiple of {LANES}, or all"
        )
    each = heads * group
    pack = max(p for p in range(1, min(_MOST_PACKED, LANES // nodes) + 1) if each % p == 0)
    wide = pack * nodes
    tree = lambda *shape: pl.BlockSpec((1, *shape), lambda i, h: (i, 0, 0))  # noqa: E731
    part = lambda *shape: pl.BlockSpec((1, 1, *shape), lambda i, h: (i, h, 0, 0))  # noqa: E731
    tokens = lambda size, width: pl.BlockSpec((1, size, width), lambda i, h: (i, 0, h))  # noqa: E731
    per_head = lambda *shape: pl.BlockSpec((1, each, *shape), lambda i, h: (i, h, 0, 0))  # noqa: E731
    in_specs = [tree(nodes, 3 * nodes), tree(nodes, wide), tree(nodes, wide)]
    in_specs += [part(len(COLUMNS) * nodes, each), part(2 * each // pack, wide)]
    in_specs += [tokens(nodes, heads * dk), tokens(nodes, heads * dk), tokens(nodes, each * dv), per_head(dk, dv)]
    out_specs = [tokens(nodes, each * dv), per_head(nodes, dv)]
    if pending is not None:
        in_specs += [part(rows + 1, each), tokens(rows, heads * dk), per_head(rows, dv)]
        out_specs.append(per_head(dk, dv))
    return Plan(nodes, rows, heads, group, pack, pl.GridSpec((b, hk // heads), in_specs, out_specs))


def heuristic(nodes: int, rows: int, hk: int, group: int, dk: int, dv: int, sizes: Sequence[int]) -> Config:
    """The Config for this many padded nodes and pending rows; sizes are those of an entry of q, v and state.

    Some 16 value heads hide each other's latencies, 8 of many nodes; a program's fixed cost (about 0.35 us) hides
    behind the transfer of so much state. Raises UnsupportedError if nothing fits VMEM.
    """
    most = 16 if nodes <= 32 else 8 if nodes <= 64 else 4
    fits = [h for h in range(1, hk + 1) if hk % h == 0]
    fits = [h for h in fits if h == hk or not (h * dk % LANES or h * group * dv % LANES)]
    need = lambda heads: vmem_bytes(heads, nodes, rows, group, dk, dv, sizes)  # noqa: E731
    if need(fits[0]) > _BUDGET:
        raise UnsupportedError(
            f"q: got {nodes} nodes on states of {dk} x {dv} x {group}, which need {need(fits[0]) / 2**20:.1f} MiB of "
            f"VMEM in pallas_tpu, takes what fits {_BUDGET / 2**20:.0f} MiB; use 'xla'"
        )
    return Config(max([fits[0], *(h for h in fits if h * group <= most and need(h) <= _BUDGET)]))


def vmem_bytes(heads: int, nodes: int, rows: int, group: int, dk: int, dv: int, sizes: Sequence[int]) -> int:
    """VMEM that the blocks (double-buffered) and what lives between the steps take."""
    q, v, state = sizes
    dk, dv = _up(dk, LANES), _up(dv, LANES)
    streamed = nodes * (2 * dk * q + group * dv * (2 * v + 4)) + rows * (dk * q + group * dv * 4)
    streamed += group * dk * dv * state * (2 if rows else 1)
    kept = group * nodes * (4 * dv * 4 + 4 * LANES * 4)
    return heads * (2 * streamed + kept) + 2 * nodes * 6 * LANES * 4


def bytes_moved(q: Any, v: Any, state: Any, pending: Any = None, **options: Any) -> int:
    """Bytes between HBM and VMEM; the arguments are `plan`'s."""
    spec = plan(q, v, state, pending, **options).spec
    number = jnp.float32
    dtypes = [jnp.bfloat16, jnp.int32, jnp.int32, number, number, q.dtype, q.dtype, v.dtype, state.dtype]
    dtypes += [] if pending is None else [number, pending.k.dtype, pending.u.dtype]
    dtypes += [v.dtype, number, state.dtype]
    return dma_bytes(spec.grid, list(zip([*spec.in_specs, *spec.out_specs], dtypes, strict=False)))


def _tree(mask: Bool[Array, "b n n"], pack: int) -> list[Array]:
    """Ancestors three times beside each other; and per pack the bisection's levels, and which nodes m are not j's.

    levels[i, j] is -2 for a j that i does not see, -1 for i itself, and for an ancestor the highest bit in which their
    depths differ: that is the one step of the bisection which takes in the pair.
    """
    depth = depths(mask)
    differ = depth[:, :, None] ^ depth[:, None]
    levels = jnp.where(mask, 31 - lax.clz(differ), -2)
    beside = lambda x, times: jnp.tile(x, (1, 1, times))  # noqa: E731
    apart = (~mask).swapaxes(1, 2)
    return [beside(mask, 3).astype(jnp.bfloat16), beside(levels, pack), beside(apart, pack).astype(jnp.int32)]


def _scalars(rows: Rows, scale: float, p: Plan) -> list[Array]:
    """Numbers of nodes: a column per value head, a block of rows per name; key norms and beta as a pack's lanes lie."""
    b, n, hv = rows.decay.shape
    ones = jnp.ones((b, n, hv), jnp.float32)
    per_head = lambda x: ones if x is None else jnp.repeat(x, p.group, axis=2)  # noqa: E731
    named = {
        "decay": rows.decay,
        "beta": ones if rows.beta is None else rows.beta,
        "k_norm": per_head(rows.k_norm),
        "q_scale": scale * per_head(rows.q_norm),
        "broken": jnp.where(rows.broken, jnp.nan, 0.0),
    }
    parts = hv // (p.heads * p.group)
    padded = jnp.stack([_pad(named[name].astype(jnp.float32), 1, p.nodes) for name in COLUMNS], axis=1)
    columns = padded.reshape(b, len(COLUMNS) * p.nodes, parts, -1).swapaxes(1, 2)
    lanes = padded[:, [COLUMNS.index("k_norm"), COLUMNS.index("beta")]].swapaxes(2, 3)
    lanes = lanes.reshape(b, 2, parts, -1, p.pack * p.nodes).swapaxes(1, 2)
    return [columns, lanes.reshape(b, parts, -1, p.pack * p.nodes)]


def _pending(pending: Pending, p: Plan) -> list[Array]:
    """Weights times key norms by column, the state's own weight under them; keys; u."""
    b, size = pending.k.shape[:2]
    weight = pending.weight.astype(jnp.float32)
    if pending.k_norm is not None:
        norm = jnp.repeat(pending.k_norm.swapaxes(1, 2), p.group, axis=1)
        weight = jnp.where(weight == 0, 0, weight * norm)
    kept = jnp.exp(pending.decay.astype(jnp.float32))
    columns = jnp.concatenate([_pad(weight, 2, p.pending), kept[..., None]], axis=2)
    columns = columns.reshape(b, -1, p.heads * p.group, p.pending + 1).swapaxes(2, 3)
    return [columns, _pad(pending.k.reshape(b, size, -1), 1, p.pending), _pad(pending.u, 2, p.pending)]


def _up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def _pad(x: Array, axis: int, size: int) -> Array:
    """Zeros behind x along an axis, up to a size."""
    return jnp.pad(x, [(0, size - x.shape[i] if i == axis else 0) for i in range(x.ndim)])
