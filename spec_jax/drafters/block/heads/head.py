"""What a causal head is: it corrects a block's logits for the tokens chosen before a slot."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.network import BlockParams


@flax.struct.dataclass
class Block:
    """A batch of blocks that the network has run, and what its head made of them once.

    hidden and normed are all slots' rows before and after the final norm; logits those of the slots that predict, by
    depth, over the tokens that can be drafted. previous is the token before the anchor (the anchor itself, where there
    is none) and feature the tapped features of the last committed token.
    """

    anchor: Int[Array, "b"]
    previous: Int[Array, "b"]
    feature: Float[Array, "b taps hidden"]
    hidden: Float[Array, "b s hidden"]
    normed: Float[Array, "b s hidden"]
    logits: Float[Array, "b d draft_vocab"]
    config: BlockConfig = flax.struct.field(pytree_node=False)
    prepared: Any = None

    def base(self, depth: Int[Array, ""] | int) -> Float[Array, "b draft_vocab"]:
        """The network's own logits at a depth; the anchor's children are depth 0."""
        return jnp.take(self.logits, depth, axis=1)

    def row(self, rows: Float[Array, "b s n"], depth: Int[Array, ""] | int) -> Float[Array, "b n"]:
        """Of all slots' rows, that of the slot that predicts at a depth."""
        return jnp.take(rows, depth + self.config.first_slot, axis=1)


@runtime_checkable
class Head(Protocol):
    """A causal head. Static and hashable; its parameters are `BlockParams.head`.

    A node's state is what the head keeps of the tokens on its root path, the node's own among them: a pytree of
    [b, k, ...] for k nodes of a depth.
    """

    @property
    def final_tap(self) -> bool:
        """Whether it reads the target's last hidden state too, tapped behind the network's own taps."""
        ...

    @property
    def uncut(self) -> Head:
        """The head as training asks it: where its candidates are but a cut of the tokens it scores, one without them.

        A token that is no candidate would give no gradient. A head that can score its candidates alone is its own;
        where the label is none of these, the objective takes the network's own logits (`train.slots.Slots.backed`).
        """
        ...

    def init(self, config: BlockConfig, key: Array) -> Any:
        """Random parameters, which leave the network's logits as they are, or nearly."""
        ...

    def prepare(self, params: BlockParams, block: Block) -> Any:
        """What is computed once a block."""
        ...

    def start(self, params: BlockParams, block: Block) -> Any:
        """The state before the anchor, [b, ...]."""
        ...

    def step(
        self, params: BlockParams, block: Block, depth: Int[Array, ""], state: Any, token: Int[Array, "b k"]
    ) -> tuple[Any, Float[Array, "b k draft_vocab"]]:
        """Add nodes below those of `state`: their states, and the logits behind them, which are those of `depth`.

        The anchor is added at depth 0.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Causal:
    """What most heads are: they read nothing of the target but the taps, and score as many tokens as they can."""

    final_tap: bool = dataclasses.field(default=False, init=False)

    @property
    def uncut(self) -> Any:
        """The head itself."""
        return self


class Cut(Causal):
    """A head whose `candidates` are a cut for speed: with None it scores every token."""

    @property
    def uncut(self) -> Any:
        """The head without a cut."""
        whole: Any = self
        return dataclasses.replace(whole, candidates=None)


@dataclasses.dataclass(frozen=True)
class Plain(Causal):
    """No head: a slot's logits whatever came before (DFlash, JetSpec)."""

    def init(self, config: BlockConfig, key: Array) -> None:
        """No parameters."""

    def prepare(self, params: BlockParams, block: Block) -> None:
        """Nothing."""

    def start(self, params: BlockParams, block: Block) -> tuple[()]:
        """Nothing."""
        return ()

    def step(
        self, params: BlockParams, block: Block, depth: Int[Array, ""], state: Any, token: Int[Array, "b k"]
    ) -> tuple[Any, Float[Array, "b k draft_vocab"]]:
        """The network's logits."""
        base = block.base(depth)[:, None]
        return state, jnp.broadcast_to(base, (*token.shape, base.shape[-1]))


PLAIN = Plain()


def scatter(values: Float[Array, "b k m"], ids: Int[Array, "b m"], size: int) -> Float[Array, "b k v"]:
    """Logits of some tokens as logits over `size` of them, -inf elsewhere; ids below 0 are left out."""
    b, k, _ = values.shape
    at = jnp.where(ids < 0, size, ids)
    rows = jnp.arange(b)[:, None, None]
    return jnp.full((b, k, size), -jnp.inf).at[rows, jnp.arange(k)[:, None], at[:, None]].set(values, mode="drop")
