"""A cache that is a ring of slots: which text positions it holds, and which blocks of it a row reads."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.tree_attention.blocks import Blocks


@dataclasses.dataclass(frozen=True)
class Ring(Blocks):
    """The blocks of a cache that keeps the last `slots` text positions alone: position p is in slot p mod slots.

    A row reads from its window's start on, around the ring; where that ends in the block it began in, once.
    """

    @property
    def steps(self) -> int:
        """Most blocks that any row reads."""
        assert self.window is not None
        seam = self.slots % self.size > 0  # a shorter block, so that one more may be touched
        return min(self._every, -(-self.window // self.size) + 1 + seam)

    def count(self, length: Any) -> Any:
        """How many blocks a row reads."""
        begin, end = self._begin(length), self._slot(jnp.maximum(length - 1, 0))
        blocks = self._over(end) - self._over(begin) + 1 + jnp.where(end < begin, self._every, 0)
        return jnp.where(self._start(length) < length, jnp.minimum(blocks, self._every), 0)

    def at(self, step: Any, length: Any) -> Any:
        """The block that a row reads at a step; steps past its count repeat the last one, and nothing is fetched."""
        step = jnp.maximum(jnp.minimum(step, self.count(length) - 1), 0)
        block = self._over(self._begin(length)) + step
        return jnp.where(block >= self._every, block - self._every, block)

    def visible(self, slot: Any, length: Any, depth: Any) -> Any:
        """Whether a node of this depth sees a slot."""
        return (slot < self.slots) & self._sees(self._position(slot, length), length, depth)

    def whole(self, block: Any, length: Any, depth: int) -> Any:
        """Whether nodes down to this depth all see all of a block."""
        start, head = block * self.size, self._slot(length)
        end = start + self.size
        together = (end <= head) | (start >= head)  # the newest position and the oldest are not both in it
        return together & (end <= self.slots) & self._sees(self._position(start, length), length, depth)

    def used(self, length: Any) -> Any:
        """How many blocks hold a row's text."""
        return self._over(jnp.minimum(length, self.slots) + self.size - 1)

    def first(self, length: Any) -> Any:
        """The lowest block that a row may read: it goes around."""
        return 0

    @property
    def _every(self) -> int:
        return -(-self.slots // self.size)

    def _start(self, length: Any) -> Any:
        """The first position that a row reads."""
        assert self.window is not None
        return jnp.maximum(length - self.window + 1, 0)

    def _begin(self, length: Any) -> Any:
        return self._slot(self._start(length))

    def _slot(self, position: Any) -> Any:
        return position - self._lap(position)

    def _lap(self, position: Any) -> Any:
        """The position in slot 0 when this one is written."""
        return lax.div(position, jnp.int32(self.slots)) * self.slots

    def _position(self, slot: Any, length: Any) -> Any:
        """The position that a slot holds: the last one below the length; negative if there is none."""
        lap = self._lap(length)
        return slot + lap - jnp.where(slot >= length - lap, self.slots, 0)

    def _sees(self, position: Any, length: Any, depth: Any) -> Any:
        assert self.window is not None
        return (position >= 0) & (position > length + depth - self.window)


def blocks_of(size: int, slots: int, window: int | None, sinks: int, ring: bool) -> Blocks:
    """The blocks of a cache that holds whole texts, or of a ring."""
    return (Ring if ring else Blocks)(size, slots, window, sinks)
