"""Bytes that a pipelined Pallas TPU kernel moves, from its grid and block specs: not what its CostEstimate claims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np


def dma_bytes(grid: Sequence[Any], operands: Sequence[tuple[Any, Any]], *scalars: Any) -> int:
    """Bytes of all blocks that are copied between HBM and VMEM over a grid, its last axis fastest.

    A block is copied whenever its index differs from the step before. operands: a pl.BlockSpec and a dtype for each
    input and output; scalars: the prefetched arguments that the index maps take. Blocks over an array's end count in
    full.
    """
    steps = [jnp.asarray(x.reshape(-1)) for x in np.indices(grid, np.int32)]
    total = 0
    for spec, dtype in operands:
        index = [np.broadcast_to(np.asarray(x), steps[0].shape) for x in spec.index_map(*steps, *scalars)]
        moved = 1 + int((np.diff(np.stack(index), axis=1) != 0).any(0).sum())
        total += moved * math.prod(spec.block_shape) * jnp.dtype(dtype).itemsize
    return total
