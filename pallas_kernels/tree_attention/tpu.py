"""Tree attention as a Pallas TPU kernel: one pass over the live cache blocks of a row, the tree block in front."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.traffic import dma_bytes
from pallas_kernels.tree_attention import masks
from pallas_kernels.tree_attention.blocks import Blocks, UnsupportedError, check_dtypes
from pallas_kernels.tree_attention.ring import blocks_of

_LANES = 128
_LOG2E = math.log2(math.e)
_FLOOR = float(np.finfo(np.float32).min)
_BUDGET = 12 * 2**20  # of the 16 MiB that a kernel has without asking, on v5e; the rest is left to the compiler


@dataclasses.dataclass(frozen=True)
class Config:
    """Block sizes: cache slots per block (a multiple of 128) and key/value heads per grid step (divides their number).

    All rows of a head, nodes x query heads of the group, are in one block, so that the cache is read once.
    """

    slots: int
    heads: int


def heuristic(rows: int, m: int, kv: int, s: int, d: int, itemsize: int) -> Config:
    """The Config for `rows` query rows per key/value head, m tree rows and blocks of at most s slots.

    Long blocks of many heads hide a grid step's fixed cost (about 0.35 us) behind their transfer; past some 512 query
    rows a step has enough to compute. Raises UnsupportedError if nothing fits VMEM.
    """
    for slots in (512, 256, 128):
        for heads in range(kv, 0, -1):
            if kv % heads or (heads > 1 and heads * rows > 512):
                continue
            config = Config(min(slots, s), heads)
            if vmem_bytes(config, rows, m, d, itemsize) <= _BUDGET:
                return config
    least = vmem_bytes(Config(_LANES, 1), rows, m, d, itemsize)
    raise UnsupportedError(
        f"q: got {rows} rows (nodes x query heads of a group) of head_dim {d} and {m} tree rows, which need "
        f"{least / 2**20:.1f} MiB of VMEM in pallas_tpu, takes what fits {_BUDGET / 2**20:.0f} MiB; use 'xla'"
    )


def vmem_bytes(config: Config, rows: int, m: int, d: int, itemsize: int) -> int:
    """VMEM that the blocks (double-buffered), the accumulators and a head's logits take."""
    lanes = -(-d // _LANES) * _LANES
    streamed = 2 * config.heads * (config.slots + m + rows) * lanes * itemsize * 2
    kept = config.heads * rows * (lanes + 2 * _LANES) * 4
    logits = 3 * rows * max(config.slots, m) * 4
    return streamed + kept + logits


def tree_attention(
    q: Float[Array, "b n heads d"],
    cache_k: Float[Array, "b kv s d"],
    cache_v: Float[Array, "b kv s d"],
    length: Int[Array, "b"],
    tree_k: Float[Array, "b kv m d"],
    tree_v: Float[Array, "b kv m d"],
    mask: Bool[Array, "b n m"],
    scale: float,
    *,
    window: int | None = None,
    sinks: int = 0,
    ring: bool = False,
    soft_cap: float | None = None,
    config: Config | None = None,
    interpret: Any = False,
) -> Float[Array, "b n heads d"]:
    """See `api.tree_attention`. Products of bfloat16 arrays take one MXU pass, products of float32 arrays six.

    Raises ValueError for rows that don't fit VMEM and for a config that doesn't fit the arrays.
    """
    check_dtypes("pallas_tpu", q=q, cache_k=cache_k, cache_v=cache_v, tree_k=tree_k, tree_v=tree_v)
    b, n, heads, d = q.shape
    kv, s = cache_k.shape[1:3]
    p = plan(q, cache_k, tree_k, window=window, sinks=sinks, ring=ring, config=config)
    tree_k, tree_v = (_pad(x, 2, p.m) for x in masks.shield(tree_k, tree_v))
    cache_k, cache_v = (_pad(x, 2, max(s, _LANES)) for x in (cache_k, cache_v))
    queries = _pad(q.swapaxes(1, 2), 2, p.nodes).reshape(b, kv, p.rows, d)
    visible = _pad(_pad(masks.narrow(mask, length, window, sinks).astype(jnp.int32), 1, p.nodes), 2, p.m)
    depth = [] if window is None else [_pad(masks.depth(mask), 1, p.nodes)[..., None]]
    keys = p.blocks.steps * p.blocks.size + p.m
    out = pl.pallas_call(
        functools.partial(_kernel, blocks=p.blocks, scale=scale, soft_cap=soft_cap),
        grid_spec=p.spec,
        out_shape=jax.ShapeDtypeStruct(queries.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * b * kv * p.rows * keys * d,
            transcendentals=b * kv * p.rows * keys,
            bytes_accessed=2 * b * kv * keys * d * cache_k.dtype.itemsize,
        ),
        interpret=interpret,
        name="tree_attention",
    )(length.astype(jnp.int32), queries, cache_k, cache_v, tree_k, tree_v, visible, *depth)
    return out.reshape(b, heads, p.nodes, d)[:, :, :n].swapaxes(1, 2)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call is laid out: nodes and tree rows padded, query rows per key/value head, cache blocks, grid, specs."""

    config: Config
    blocks: Blocks
    nodes: int
    rows: int
    m: int
    spec: pltpu.PrefetchScalarGridSpec


def plan(
    q: Any, cache_k: Any, tree_k: Any, *, window: int | None = None, sinks: int = 0, ring: bool = False,
    config: Config | None = None,
) -> Plan:  # fmt: skip
    """The layout for arrays (or ShapeDtypeStructs) as `tree_attention` takes them; raises as it does.

    The grid is (batch row, heads, cache block), and the row lengths are prefetched. The operands: queries, cache keys
    and values, tree keys and values, the tree mask and, with a window, node depths.
    """
    b, n, heads, d = q.shape
    kv, s = cache_k.shape[1:3]
    group, most = heads // kv, max(s // _LANES * _LANES, _LANES)
    nodes, m = _up(n, 8 if group % 2 == 0 else 16), _up(tree_k.shape[2], 16)
    rows = group * nodes
    config = config or heuristic(rows, m, kv, most, d, max(q.dtype.itemsize, cache_k.dtype.itemsize))
    if config.slots % _LANES or not 0 < config.slots <= most or config.heads < 1 or kv % config.heads:
        raise ValueError(
            f"config: got {config}, takes slots that are a multiple of 128, at most {most}, and heads that divide {kv}"
        )
    blocks = blocks_of(config.slots, s, window, sinks, ring)
    per_head = lambda size: pl.BlockSpec((1, config.heads, size, d), lambda i, h, j, length: (i, h, 0, 0))  # noqa: E731
    per_node = lambda width: pl.BlockSpec((1, nodes, width), lambda i, h, j, length: (i, 0, 0))  # noqa: E731
    cache = pl.BlockSpec((1, config.heads, config.slots, d), lambda i, h, j, length: (i, h, blocks.at(j, length[i]), 0))
    depth = [] if window is None else [per_node(1)]
    scratch = lambda width: pltpu.VMEM((config.heads, rows, width), jnp.float32)  # noqa: E731
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(b, kv // config.heads, max(blocks.steps, 1)),
        in_specs=[per_head(rows), cache, cache, per_head(m), per_head(m), per_node(m), *depth],
        out_specs=per_head(rows),
        scratch_shapes=[scratch(_LANES), scratch(_LANES), scratch(d)],
    )
    return Plan(config, blocks, nodes, rows, m, spec)


def bytes_moved(q: Any, cache_k: Any, tree_k: Any, length: Any, **options: Any) -> int:
    """Bytes between HBM and VMEM for rows of these lengths; the other arguments and `options` are `plan`'s."""
    spec = plan(q, cache_k, tree_k, **options).spec
    cache, tree = cache_k.dtype, tree_k.dtype
    dtypes = (q.dtype, cache, cache, tree, tree, jnp.int32, jnp.int32)
    operands = [*zip(spec.in_specs, dtypes, strict=False), (spec.out_specs, q.dtype)]
    return dma_bytes(spec.grid, operands, jnp.asarray(length, jnp.int32))


def _kernel(length_ref, q_ref, k_ref, v_ref, tree_k_ref, tree_v_ref, mask_ref, *refs, blocks, scale, soft_cap):
    out_ref, peak_ref, total_ref, acc_ref = refs[-4:]
    step, length = pl.program_id(2), length_ref[pl.program_id(0)]
    _, heads, rows, d = q_ref.shape
    _, n, m = mask_ref.shape

    def logits(h, keys):  # in base 2
        x = _dot(q_ref[0, h], keys, 1)
        return x * (scale * _LOG2E) if soft_cap is None else jnp.tanh(x * (scale / soft_cap)) * (soft_cap * _LOG2E)

    def where(allowed, x):  # one mask for all query heads of the group
        return jnp.where(allowed[None], x.reshape(rows // n, n, -1), -jnp.inf).reshape(x.shape)

    @pl.when(step == 0)
    def _tree():
        allowed = mask_ref[0] != 0
        lane = lax.broadcasted_iota(jnp.int32, (rows, _LANES), 1)
        for h in range(heads):
            x = where(allowed, logits(h, tree_k_ref[0, h]))
            peak = jnp.maximum(x.max(-1, keepdims=True), _FLOOR)
            weights = jnp.exp2(x - peak)
            peak_ref[h] = jnp.broadcast_to(peak, (rows, _LANES))
            total_ref[h] = jnp.where(lane == 0, weights.sum(-1, keepdims=True), 0.0)
            acc_ref[h] = _dot(weights, tree_v_ref[0, h], 0)

    def prefix(edge):
        start, allowed, used = blocks.at(step, length) * blocks.size, jnp.bool_(True), jnp.bool_(True)
        if edge:
            depth = refs[0][0] if blocks.window is not None else 0
            slot = start + lax.broadcasted_iota(jnp.int32, (n, blocks.size), 1)
            allowed = blocks.visible(slot, length, depth)
            used = blocks.visible(start + lax.broadcasted_iota(jnp.int32, (blocks.size, d), 0), length, 0)
        for h in range(heads):
            x, values = logits(h, k_ref[0, h]), v_ref[0, h]
            if edge:
                x = where(allowed, x)
                values = jnp.where(used, values.astype(jnp.float32), 0.0).astype(values.dtype)
            old = peak_ref[h]
            peak = jnp.maximum(old, x.max(-1, keepdims=True))
            keep = jnp.exp2(old - peak)
            weights = jnp.exp2(x - _lanes(peak, blocks.size))
            peak_ref[h] = peak
            # Each lane sums its own slots; the lanes are added up once, at the end.
            total_ref[h] = total_ref[h] * keep + sum(weights[:, i : i + _LANES] for i in range(0, blocks.size, _LANES))
            acc_ref[h] = acc_ref[h] * _lanes(keep, d) + _dot(weights, values, 0)

    live = step < blocks.count(length)
    whole = blocks.whole(blocks.at(step, length), length, m - 1)
    pl.when(live & whole)(functools.partial(prefix, edge=False))
    pl.when(live & ~whole)(functools.partial(prefix, edge=True))

    @pl.when(step == pl.num_programs(2) - 1)
    def _write():
        for h in range(heads):
            total = total_ref[h].sum(-1, keepdims=True)
            out_ref[0, h] = (acc_ref[h] / jnp.where(total > 0, total, 1.0)).astype(out_ref.dtype)


def _dot(a: Array, b: Array, axis: int) -> Array:
    """The product over a's last axis and `axis` of b, in explicit bfloat16 passes, added in float32.

    The MXU multiplies bfloat16, so a float32 array is taken as a sum of three; of the products those are left out that
    are below float32's resolution. Softmax weights are rounded to bfloat16 where the values are.
    """
    if b.dtype == jnp.bfloat16 and axis == 0:
        a = a.astype(jnp.bfloat16)
    terms = [(x, y) for i, x in enumerate(_split(a)) for j, y in enumerate(_split(b)) if i + j < 3]
    dims = (((1,), (axis,)), ((), ()))
    products = [lax.dot_general(x, y, dims, preferred_element_type=jnp.float32) for x, y in terms]
    return functools.reduce(jnp.add, products)


def _split(x: Array) -> list[Array]:
    if x.dtype == jnp.bfloat16:
        return [x]
    terms = []
    for _ in range(3):
        terms.append(x.astype(jnp.bfloat16))
        x = x - terms[-1].astype(jnp.float32)
    return terms


def _lanes(x: Array, width: int) -> Array:
    """An array of 128 equal lanes, at another width."""
    return x[:, :width] if width <= _LANES else jnp.tile(x, (1, -(-width // _LANES)))[:, :width]


def _up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def _pad(x: Array, axis: int, size: int) -> Array:
    """Zeros behind x along an axis, up to a size."""
    return jnp.pad(x, [(0, size - x.shape[i] if i == axis else 0) for i in range(x.ndim)])
