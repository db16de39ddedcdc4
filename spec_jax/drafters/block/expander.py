"""A block and its head as an expander: what a growing tree asks, and what training asks of known texts."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from spec_jax.drafters.block.heads.head import Block, Head
from spec_jax.drafters.block.network import BlockParams, full_logits


@flax.struct.dataclass
class BlockPool:
    """The block, the head's states of all nodes by number, the depth and the first number of the nodes that come."""

    block: Block
    states: Any
    depth: Int[Array, ""]
    count: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class BlockExpander:
    """A causal head over a block; params are `BlockParams`."""

    head: Head

    def root(self, params: BlockParams, block: Block, nodes: int) -> tuple[BlockPool, Float[Array, "b vocab"]]:
        """A pool with room for `nodes` expanded nodes that holds the anchor, and the logits behind it."""
        before = jax.tree.map(lambda x: x[:, None], self.head.start(params, block))
        state, logits = self.head.step(params, block, jnp.int32(0), before, block.anchor[:, None])
        room = lambda x: jnp.zeros((x.shape[0], nodes, *x.shape[2:]), x.dtype).at[:, :1].set(x)  # noqa: E731
        pool = BlockPool(block, jax.tree.map(room, state), jnp.int32(1), jnp.int32(1))
        return pool, full_logits(block.config, params, logits[:, 0])

    def expand(
        self, params: BlockParams, pool: BlockPool, parent: Int[Array, "b k"], token: Int[Array, "b k"]
    ) -> tuple[BlockPool, Float[Array, "b k vocab"]]:
        """The next depth's nodes."""
        at = jnp.maximum(parent, 0)
        take = jax.vmap(lambda x, i: x[i])
        above = jax.tree.map(lambda x: take(x, at), pool.states)
        state, logits = self.head.step(params, pool.block, pool.depth, above, token)
        put = lambda to, x: lax.dynamic_update_slice_in_dim(to, x, pool.count, axis=1)  # noqa: E731
        states = jax.tree.map(put, pool.states, state)
        pool = BlockPool(pool.block, states, pool.depth + 1, pool.count + token.shape[1])
        return pool, full_logits(pool.block.config, params, logits)


def teacher_logits(
    head: Head, params: BlockParams, block: Block, tokens: Int[Array, "b d"]
) -> Float[Array, "b d draft_vocab"]:
    """Logits of every depth given the true tokens before it: tokens[:, i] precedes depth i, the anchor first.

    Differentiable in params.network (through the block) and params.head.
    """

    def step(state: Any, x: tuple[Array, Array]) -> tuple[Any, Array]:
        depth, token = x
        state, logits = head.step(params, block, depth, state, token[:, None])
        return state, logits[:, 0]

    before = jax.tree.map(lambda x: x[:, None], head.start(params, block))
    depths = jnp.arange(tokens.shape[1])
    _, logits = lax.scan(step, before, (depths, tokens.T))
    return logits.swapaxes(0, 1)
