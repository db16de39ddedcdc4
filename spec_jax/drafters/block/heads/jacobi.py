"""xPress's refiner (arXiv 2608.02438): a causal mixer over the whole block, run in parallel until tokens settle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.ends import apply
from spec_jax.drafters.block.heads.head import Block, Causal
from spec_jax.drafters.block.network import BlockParams
from spec_jax.models.config import require
from spec_jax.models.linear import Dense, Linear


@flax.struct.dataclass
class JacobiParams:
    """Token codes [vocab, rank]; maps of the row, the block's mean and both with a code to rank; mixer; MLP; readout.

    mixer [rank, slots, slots]: the entry (c, k, j) is what slot j's channel c adds to slot k's, for j <= k alone.
    """

    tokens: Float[Array, "vocab rank"]
    row: Linear
    mean: Linear
    joined: Linear
    mixer: Float[Array, "rank s s"]
    gate: Linear
    up: Linear
    down: Linear
    readout: Linear


@dataclasses.dataclass(frozen=True)
class Jacobi(Causal):
    """logits + readout of each slot's and earlier slots' mix of rows, the block's mean row and the tokens before them.

    `marginals` runs all slots at once, `passes` times, each on the tokens that the last pass chose: after as many as
    there are slots it is the sequential result, and mostly long before. As a head behind nodes (`step`) it is that
    result itself, conditioned on each node's path.

    Attributes:
        rank: size of everything in the refiner.
        ratio: the MLP's inner size in ranks.
        passes: of `marginals`.
    """

    rank: int = 256
    ratio: int = 2
    passes: int = 6

    def __post_init__(self) -> None:
        """Check the settings."""
        for name in ("rank", "ratio", "passes"):
            value = getattr(self, name)
            require(isinstance(value, int) and value > 0, name, value, "an integer of at least 1")

    def init(self, config: BlockConfig, key: Array) -> JacobiParams:
        """A small random correction; the mixer is zero."""
        r, h, inner, s = self.rank, config.hidden_size, self.rank * self.ratio, config.block_size
        keys = iter(jax.random.split(key, 8))
        draw = lambda *shape: 0.02 * jax.random.normal(next(keys), shape)  # noqa: E731
        return JacobiParams(
            tokens=draw(config.vocab_size, r),
            row=Dense(draw(h, r)),
            mean=Dense(draw(h, r)),
            joined=Dense(draw(3 * r, r)),
            mixer=jnp.zeros((r, s, s)),
            gate=Dense(draw(r, inner)),
            up=Dense(draw(r, inner)),
            down=Dense(draw(inner, r)),
            readout=Dense(draw(r, config.logit_size)),
        )

    def prepare(self, params: BlockParams, block: Block) -> Float[Array, "b s two_ranks"]:
        """What rows and their mean give every slot."""
        own: JacobiParams = params.head
        mean = jnp.broadcast_to(apply(own.mean, block.normed.mean(1))[:, None], (*block.normed.shape[:2], self.rank))
        return jnp.concatenate([apply(own.row, block.normed), mean], axis=-1)

    def start(self, params: BlockParams, block: Block) -> Float[Array, "b s rank"]:
        """Every slot's input, zeros where the token before it is not known yet."""
        inputs = jnp.zeros((*block.normed.shape[:2], self.rank))
        if block.config.first_slot == 0:
            return inputs
        return inputs.at[:, 0].set(self._inputs(params.head, block.prepared[:, 0], block.previous))

    def step(
        self, params: BlockParams, block: Block, depth: Int[Array, ""], state: Any, token: Int[Array, "b k"]
    ) -> tuple[Any, Float[Array, "b k draft_vocab"]]:
        """The logits given the path."""
        own, slot = params.head, depth + block.config.first_slot
        fixed = block.row(block.prepared, depth)[:, None]
        here = self._inputs(own, jnp.broadcast_to(fixed, (*token.shape, fixed.shape[-1])), token)
        state = state.at[:, :, slot].set(here)
        weights = jnp.where(jnp.arange(state.shape[2]) <= slot, jnp.take(own.mixer, slot, axis=1), 0)
        x = here + jnp.einsum("cj,bkjc->bkc", weights, state)
        return state, block.base(depth)[:, None] + self._readout(own, x)

    def marginals(
        self,
        params: BlockParams,
        block: Block,
        choose: Callable[[Float[Array, "b d draft_vocab"]], Int[Array, "b m"]],
    ) -> Float[Array, "b d draft_vocab"]:
        """Logits of all depths after the passes; `choose` says which tokens (of the target's) a pass takes.

        It may choose for the first m depths alone.
        """
        logits = block.logits
        for _ in range(self.passes):
            logits = self.refine(params, block, choose(logits))
        return logits

    def refine(self, params: BlockParams, block: Block, tokens: Int[Array, "b m"]) -> Float[Array, "b d draft_vocab"]:
        """One pass: logits of all depths, given the tokens at the first m of them."""
        own, s = params.head, block.config.block_size
        first = [block.previous, block.anchor][1 - block.config.first_slot :]
        before = jnp.concatenate([jnp.stack(first, axis=1), tokens], axis=1)
        before = jnp.pad(before, ((0, 0), (0, max(0, s - before.shape[1]))))[:, :s]
        x = self._inputs(own, block.prepared, before)
        x = x + jnp.einsum("ckj,bjc->bkc", jnp.tril(own.mixer), x)
        return block.logits + self._readout(own, x[:, block.config.first_slot :])

    def _inputs(self, own: JacobiParams, fixed: Array, token: Array) -> Array:
        return apply(own.joined, jnp.concatenate([fixed, own.tokens[token]], axis=-1))

    def _readout(self, own: JacobiParams, x: Array) -> Array:
        x = x + apply(own.down, jax.nn.silu(apply(own.gate, x)) * apply(own.up, x))
        return apply(own.readout, x).astype(jnp.float32)
