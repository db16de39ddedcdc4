"""Tree attention as a Pallas-Triton kernel: a row's cache blocks are shared out over programs (flash-decoding).

Each program runs an online softmax over its share; the first one starts from the tree block. XLA merges the shares by
their log-sum-exp.
"""

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
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tree_attention import masks
from pallas_kernels.tree_attention.blocks import UnsupportedError, check_dtypes
from pallas_kernels.tree_attention.ring import blocks_of

_LOG2E = math.log2(math.e)
_FLOOR = float(np.finfo(np.float32).min)
_PROGRAMS = 264  # two for each of an H100's 132 multiprocessors


@dataclasses.dataclass(frozen=True)
class Config:
    """Block sizes: query rows per program, cache slots per block (powers of two from 16), and shares of a row's blocks.

    A row's cache is read once per block of query rows; programs that differ in nothing else are neighbours in the grid,
    so all but the first of them find it in the L2 cache.
    """

    rows: int
    slots: int
    shares: int
    warps: int = 4
    stages: int = 2

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name in ("rows", "slots"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"config: got {name} {size}, takes a power of two from 16")
        if self.shares < 1:
            raise ValueError(f"config: got shares {self.shares}, takes a positive number")


def heuristic(rows: int, b: int, kv: int, s: int, d: int, itemsize: int) -> Config:
    """The Config for `rows` query rows per key/value head and s slots: what registers and shared memory hold.

    Rows are shared out until every multiprocessor has a program or two, with at least four blocks each.
    """
    wide = d * itemsize
    block = min(_power(rows), 128 if wide <= 256 else 64 if wide <= 512 else 32)
    slots = 64 if wide <= 256 else 32 if wide <= 512 else 16
    programs = b * kv * -(-rows // block)
    shares = min(_PROGRAMS // programs, s // slots // 4, 32)
    return Config(block, slots, max(1, shares), 8 if block == 128 else 4)


def _config(q: Any, cache_k: Any) -> Config:
    b, n, heads, d = q.shape
    kv, s = cache_k.shape[1:3]
    return heuristic(heads // kv * n, b, kv, s, d, max(q.dtype.itemsize, cache_k.dtype.itemsize))


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
    interpret: bool = False,
) -> Float[Array, "b n heads d"]:
    """See `api.tree_attention`. Products of bfloat16 arrays run on tensor cores, products of float32 arrays in IEEE.

    Raises ValueError for a head_dim that is no multiple of 16 or above 256.
    """
    check_dtypes("pallas_gpu", q=q, cache_k=cache_k, cache_v=cache_v, tree_k=tree_k, tree_v=tree_v)
    b, n, heads, d = q.shape
    kv, s = cache_k.shape[1:3]
    if d % 16 or d > 256:
        raise UnsupportedError(f"q: got head_dim {d}, which pallas_gpu cannot tile: takes multiples of 16 up to 256")
    group = heads // kv
    tree_k, tree_v = masks.shield(tree_k, tree_v)
    tree_k, tree_v = (_pad(x, 2, _power(x.shape[2])) for x in (tree_k, tree_v))
    m = tree_k.shape[2]
    config = config or _config(q, cache_k)
    rows = -(-group * n // config.rows) * config.rows
    per_row = lambda x: _pad(jnp.tile(x, (1, group) + (1,) * (x.ndim - 2)), 1, rows)  # noqa: E731
    queries = _pad(q.swapaxes(1, 2).reshape(b, kv, group * n, d), 2, rows)
    visible = _pad(per_row(masks.narrow(mask, length, window, sinks)), 2, m)
    of_head = lambda size: pl.BlockSpec((None, None, size, d), lambda r, t, i: (i // kv, i % kv, 0, 0))  # noqa: E731
    out, peak, total = pl.pallas_call(
        functools.partial(
            _kernel,
            blocks=blocks_of(config.slots, s, window, sinks, ring),
            scale=scale,
            soft_cap=soft_cap,
            config=config,
        ),
        grid=(rows // config.rows, config.shares, b * kv),
        in_specs=[
            pl.BlockSpec((1,), lambda r, t, i: (i // kv,)),
            pl.BlockSpec((None, None, config.rows, d), lambda r, t, i: (i // kv, i % kv, r, 0)),
            of_head(s),
            of_head(s),
            of_head(m),
            of_head(m),
            pl.BlockSpec((None, config.rows, m), lambda r, t, i: (i // kv, r, 0)),
            pl.BlockSpec((None, config.rows), lambda r, t, i: (i // kv, r)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, config.rows, d), lambda r, t, i: (i, t, r, 0)),
            pl.BlockSpec((None, None, config.rows), lambda r, t, i: (i, t, r)),
            pl.BlockSpec((None, None, config.rows), lambda r, t, i: (i, t, r)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((b * kv, config.shares, rows, d), jnp.float32),
            jax.ShapeDtypeStruct((b * kv, config.shares, rows), jnp.float32),
            jax.ShapeDtypeStruct((b * kv, config.shares, rows), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=interpret,
        name="tree_attention",
    )(length.astype(jnp.int32), queries, cache_k, cache_v, tree_k, tree_v, visible, per_row(masks.depth(mask)))
    weight = jnp.exp2(peak - peak.max(1, keepdims=True))
    total = (total * weight).sum(1)
    out = (out * weight[..., None]).sum(1) / jnp.where(total > 0, total, 1.0)[..., None]
    out = out[:, : group * n].astype(q.dtype)
    return out.reshape(b, heads, n, d).swapaxes(1, 2)


def bytes_moved(
    q: Any, cache_k: Any, tree_k: Any, length: Any, *, window: int | None = None, sinks: int = 0, ring: bool = False,
    config: Config | None = None,
) -> int:  # fmt: skip
    """Bytes that all programs read and write for rows of these lengths, hits of the L2 cache among them."""
    b, n, heads, d = q.shape
    kv, s = cache_k.shape[1:3]
    config = config or _config(q, cache_k)
    programs, m = -(-(heads // kv) * n // config.rows), _power(tree_k.shape[2])
    rows = programs * config.rows
    blocks = blocks_of(config.slots, s, window, sinks, ring)
    seen = blocks.visible(np.arange(s), np.asarray(length, np.int32)[:, None], 0).sum()
    keys = kv * 2 * d * (int(seen) * cache_k.dtype.itemsize + b * m * tree_k.dtype.itemsize)
    per_share = b * kv * rows * (d * q.dtype.itemsize + (d + 2) * 4 + 4)  # queries, partial results, depths
    return programs * keys + config.shares * per_share + b * kv * rows * m


def _kernel(
    length_ref, q_ref, k_ref, v_ref, tree_k_ref, tree_v_ref, mask_ref, depth_ref,
    out_ref, peak_ref, total_ref, *, blocks, scale, soft_cap, config,
):  # fmt: skip
    share, length, depth = pl.program_id(1), length_ref[0], depth_ref[...]
    cuts = _cuts(q_ref.shape[1])
    queries = [q_ref[:, cut] for cut in cuts]
    tile = min(blocks.size, mask_ref.shape[1])

    def merge(keys, values, allowed, carry):
        peak, total, outs = carry
        x = sum(_dot(q, k, 1) for q, k in zip(queries, keys, strict=True))
        x = x * (scale * _LOG2E) if soft_cap is None else jnp.tanh(x * (scale / soft_cap)) * (soft_cap * _LOG2E)
        x = jnp.where(allowed, x, -jnp.inf)
        new = jnp.maximum(peak, x.max(1))
        weights, keep = jnp.exp2(x - new[:, None]), jnp.exp2(peak - new)
        outs = tuple(
            out * keep[:, None] + _dot(weights.astype(v.dtype), v, 0) for out, v in zip(outs, values, strict=True)
        )
        return new, total * keep + weights.sum(1), outs

    def tree(step, carry):
        at = pl.ds(step * tile, tile)
        read = lambda ref: [ref[at, cut] for cut in cuts]  # noqa: E731
        return merge(read(tree_k_ref), read(tree_v_ref), mask_ref[:, at], carry)

    def prefix(step, carry):
        at = pl.ds(blocks.at(step, length) * blocks.size, blocks.size)
        slot = at.start + jnp.arange(blocks.size)
        used = blocks.visible(slot, length, 0)[:, None]  # unused slots are not even read
        read = lambda ref, cut: plt.load(  # noqa: E731
            ref.at[at, cut], mask=jnp.broadcast_to(used, (blocks.size, cut.size)), other=0.0
        )
        allowed = blocks.visible(slot[None, :], length, depth[:, None])
        return merge([read(k_ref, cut) for cut in cuts], [read(v_ref, cut) for cut in cuts], allowed, carry)

    rows = config.rows
    carry = (
        jnp.full((rows,), _FLOOR, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        tuple(jnp.zeros((rows, cut.size), jnp.float32) for cut in cuts),
    )
    tiles = jnp.where(share == 0, jnp.int32(mask_ref.shape[1] // tile), jnp.int32(0))
    carry = lax.fori_loop(jnp.zeros_like(tiles), tiles, tree, carry)
    count = blocks.count(length)
    each = lax.div(count + config.shares - 1, jnp.int32(config.shares))
    first = share * each
    peak, total, outs = lax.fori_loop(first, jnp.minimum(first + each, count), prefix, carry)
    for cut, out in zip(cuts, outs, strict=True):
        out_ref[:, cut] = out
    peak_ref[...], total_ref[...] = peak, total


def _dot(a: Array, b: Array, axis: int) -> Array:
    """The product over a's last axis and `axis` of b, added in float32.

    HIGHEST means no TF32 for float32 arrays; products of bfloat16 arrays are exact on tensor cores anyway.
    """
    if a.dtype != b.dtype:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    dims = (((1,), (axis,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _cuts(d: int) -> list[pl.Slice]:
    """head_dim in powers of two, the only sizes that Triton has: 96 is 64 and 32."""
    cuts, start = [], 0
    for size in (256, 128, 64, 32, 16):
        if d - start >= size:
            cuts.append(pl.ds(start, size))
            start += size
    return cuts


def _power(x: int) -> int:
    """The least power of two from x, and at least 16, a tensor core's tile."""
    return max(16, 1 << (x - 1).bit_length())


def _pad(x: Array, axis: int, size: int) -> Array:
    """Zeros behind x along an axis, up to a size."""
    return jnp.pad(x, [(0, size - x.shape[i] if i == axis else 0) for i in range(x.ndim)])
