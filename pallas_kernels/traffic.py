"""Bytes that a pipelined Pallas TPU kernel moves, counted from its grid and block specs, and not from its CostEstimate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl


def dma_bytes(grid: Sequence[int], operands: Sequence[tuple[pl.BlockSpec, Any]], *scalars: Any) -> int:
    """Bytes of all blocks that are copied between HBM and VMEM over a grid, its last axis fastest.

    A block is copied whenever its index differs from the step before. operands: a spec and a dtype each, inputs and
    outputs; scalars: the prefetched arguments that the index maps take. Blocks over an array's end count in full.
    """
    steps = [jnp.asarray(x.reshape(-1)) for x in np.indices(grid, np.int32)]
    total = 0
    for spec, dtype in operands:
        index = [np.broadcast_to(np.asarray(x), steps[0].shape) for x in spec.index_map(*steps, *scalars)]
        moved = 1 + int((np.diff(np.stack(index), axis=1) != 0).any(0).sum())
        total += moved * math.prod(spec.block_shape) * jnp.dtype(dtype).itemsize
    return total
