"""Which blocks of the cache a row reads, and in what order: the kernels' index maps, and what counts their bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


class UnsupportedError(ValueError):
    """The arrays are right, but a kernel can't serve them; the message says why."""


def check_dtypes(kernel: str, **arrays: Array) -> None:
    """UnsupportedError for an array that is neither float32 nor bfloat16."""
    for name, array in arrays.items():
        if array.dtype not in (jnp.float32, jnp.bfloat16):
            raise UnsupportedError(f"{name}: got {array.dtype}, {kernel} takes float32 or bfloat16; use 'xla'")


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A row's live cache blocks of `size` slots: those with a sink, then those from its window's start to its length.

    Without a window all slots below the length are live. `length` is an int32 scalar or array in all methods.
    """

    size: int
    slots: int
    window: int | None = None
    sinks: int = 0

    @property
    def heads(self) -> int:
        """Blocks that hold sinks."""
        return -(-self.sinks // self.size)

    @property
    def steps(self) -> int:
        """Most blocks that any row reads."""
        every = -(-self.slots // self.size)
        return every if self.window is None else min(every, self.heads + -(-self.window // self.size) + 1)

    def count(self, length: Any) -> Any:
        """How many blocks a row reads."""
        used = self.used(length)
        if self.window is None:
            return used
        return jnp.minimum(used, self.heads) + jnp.maximum(used - self.first(length), 0)

    def at(self, step: Any, length: Any) -> Any:
        """The block that a row reads at a step; steps past its count repeat the last one, and nothing is fetched."""
        step = jnp.maximum(jnp.minimum(step, self.count(length) - 1), 0)
        if self.window is None:
            return step
        block = jnp.where(step < self.heads, step, self.first(length) + step - self.heads)
        return jnp.minimum(block, -(-self.slots // self.size) - 1)

    def visible(self, slot: Any, length: Any, depth: Any) -> Any:
        """Whether a node of this depth sees a slot."""
        seen = slot < length
        if self.window is None:
            return seen
        return seen & ((slot > length + depth - self.window) | (slot < self.sinks))

    def whole(self, block: Any, length: Any, depth: int) -> Any:
        """Whether nodes down to this depth all see all of a block."""
        end = (block + 1) * self.size
        if self.window is None:
            return end <= length
        return (end <= length) & ((end - self.size > length + depth - self.window) | (end <= self.sinks))

    def used(self, length: Any) -> Any:
        """How many blocks hold a row's text."""
        return self._over(length + self.size - 1)

    def first(self, length: Any) -> Any:
        """The first block, behind those with a sink, that a row reads."""
        if self.window is None:
            return 0
        return jnp.maximum(self._over(jnp.maximum(length - self.window + 1, 0)), self.heads)

    def _over(self, x: Any) -> Any:
        return lax.div(x, jnp.int32(self.size))  # `//` would also handle signs, on the scalar core
