"""Arrays that are read piece by piece: tensors on disk as parameters see them, with no whole copy of either.

A checkpoint's tensors become parameters by transposes, picked rows and stacks. `Lazy` says for any box of the
result which boxes of the tensors it is made of, so that one mapping serves a whole array and a device's shard alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from spec_jax.models.checkpoint import LazyTensor

Box = tuple[slice, ...]

BLOCK_BYTES = 1 << 26
"""At most so many bytes of a tensor are read at once (one row of its first axis at least)."""


@dataclasses.dataclass(frozen=True)
class Lazy:
    """An array that is not there yet; `fill(out, box)` writes a box of it, of whatever type `out` has."""

    shape: tuple[int, ...]
    dtype: np.dtype
    fill: Callable[[np.ndarray, Box], None] = dataclasses.field(repr=False)

    def read(self, box: Box | None = None) -> np.ndarray:
        """A box, or the whole, in memory of its own."""
        box = tuple(slice(0, n) for n in self.shape) if box is None else box
        out = np.empty([s.stop - s.start for s in box], self.dtype)
        self.fill(out, box)
        return out


def tensor(x: Any, dtype: Any = np.float32) -> Lazy:
    """An array, or a tensor on disk that gives boxes of itself by `x[box]`."""
    kind, x = np.dtype(dtype), x if hasattr(x, "shape") else np.asarray(x)
    by_box = isinstance(x, LazyTensor) and x.part is not None

    def fill(out: np.ndarray, box: Box) -> None:
        if not box:
            out[...] = x[()]
            return
        row = math.prod(out.shape[1:]) * max(4, out.itemsize)
        rows = max(1, BLOCK_BYTES // max(1, row)) if by_box else max(1, out.shape[0])
        for at in range(0, out.shape[0], rows):
            first = slice(box[0].start + at, min(box[0].start + at + rows, box[0].stop))
            out[at : at + rows] = x[(first, *box[1:])]

    return Lazy(tuple(x.shape), kind, fill)


def leaf(x: Lazy) -> Any:
    """The same, where a tree of parameters says that it holds an array."""
    return x


def transpose(x: Lazy, *axes: int) -> Lazy:
    """The axes in another order; without one, in reverse order."""
    order = axes or tuple(reversed(range(len(x.shape))))
    back = tuple(np.argsort(order).tolist())

    def fill(out: np.ndarray, box: Box) -> None:
        x.fill(out.transpose(back), tuple(box[i] for i in back))

    return Lazy(tuple(x.shape[i] for i in order), x.dtype, fill)


def pick(x: Lazy, rows: np.ndarray) -> Lazy:
    """The given rows of the first axis, in the order given."""

    def fill(out: np.ndarray, box: Box) -> None:
        own = rows[box[0]]
        ends = [*(np.flatnonzero(np.diff(own) != 1) + 1), len(own)] if len(own) else []
        begin = 0
        for end in ends:
            x.fill(out[begin:end], (slice(int(own[begin]), int(own[end - 1]) + 1), *box[1:]))
            begin = end

    return Lazy((len(rows), *x.shape[1:]), x.dtype, fill)


def halves(x: Lazy, axis: int) -> tuple[Lazy, Lazy]:
    """The two halves along an axis."""
    size = x.shape[axis] // 2

    def half(start: int) -> Lazy:
        def fill(out: np.ndarray, box: Box) -> None:
            at = slice(box[axis].start + start, box[axis].stop + start)
            x.fill(out, (*box[:axis], at, *box[axis + 1 :]))

        return Lazy((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype, fill)

    return half(0), half(size)


def stack(parts: Sequence[Lazy]) -> Lazy:
    """On a new first axis."""

    def fill(out: np.ndarray, box: Box) -> None:
        for i, part in enumerate(parts[box[0]]):
            part.fill(out[i], box[1:])

    return Lazy((len(parts), *parts[0].shape), parts[0].dtype, fill)


def flat(x: Lazy) -> Lazy:
    """Without a second axis of size one."""
    one = slice(0, 1)
    return Lazy((x.shape[0], *x.shape[2:]), x.dtype, lambda out, box: x.fill(out[:, None], (box[0], one, *box[1:])))


def plus_one(x: Lazy) -> Lazy:
    """1 + x, in float32."""

    def fill(out: np.ndarray, box: Box) -> None:
        x.fill(out, box)
        out += 1

    return Lazy(x.shape, np.dtype(np.float32), fill)


def shapes(tree: Any) -> Any:
    """The shapes and types of a tree of lazy arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def whole(tree: Any) -> Any:
    """The arrays of a tree of lazy ones, on the default device."""
    return jax.tree.map(lambda x: jnp.asarray(x.read()), tree)


def place(x: Lazy, sharding: Sharding) -> jax.Array:
    """The array on the devices of a sharding; this process reads what its own devices hold.

    Shards are read one at a time, each once however many devices hold it: no more than one of them, and a block of a
    tensor (`BLOCK_BYTES`), is in the host's memory.
    """
    holders: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(x.shape).items():
        box = tuple(s.indices(n)[:2] for s, n in zip(index or (), x.shape, strict=True))
        holders.setdefault(box, []).append(device)
    pieces = []
    for box, devices in holders.items():
        shard = x.read(tuple(slice(*ends) for ends in box))
        pieces += jax.block_until_ready([jax.device_put(shard, device) for device in devices])
    return jax.make_array_from_single_device_arrays(x.shape, sharding, pieces, dtype=x.dtype)
