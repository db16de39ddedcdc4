"""What a growing tree asks of a drafter: logits behind new nodes."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@runtime_checkable
class Expander(Protocol):
    """A drafter as a growing tree sees it. Static and hashable; batch-native.

    Its pool is scratch with an entry per expanded node (key/value rows, recurrent states, previous tokens), numbered in
    the order of expansion. The root is node 0 and there from the start: the drafter makes the pool, and the logits
    behind the root, from what was committed.
    """

    def expand(
        self, params: Any, pool: Any, parent: Int[Array, "b k"], token: Int[Array, "b k"]
    ) -> tuple[Any, Float[Array, "b k vocab"]]:
        """Add k nodes, each below an expanded one; returns the pool with them, and the logits behind each."""
        ...


@flax.struct.dataclass
class Marginals:
    """The pool of `ContextFree`: logits of every depth, the root's children first, and the depth that comes next."""

    logits: Float[Array, "b d vocab"]
    depth: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class ContextFree:
    """A block drafter's per-depth logits as an expander: what follows a node depends on its depth alone."""

    def expand(
        self, params: None, pool: Marginals, parent: Int[Array, "b k"], token: Int[Array, "b k"]
    ) -> tuple[Marginals, Float[Array, "b k vocab"]]:
        """The next depth's logits, for every node."""
        here = jnp.take(pool.logits, pool.depth, axis=1)[:, None]
        logits = jnp.broadcast_to(here, (*token.shape, here.shape[-1]))
        return dataclasses.replace(pool, depth=pool.depth + 1), logits
