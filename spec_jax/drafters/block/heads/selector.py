"""DFlash 2's candidate selector: the best few candidates of each slot, scored with the candidate chosen before."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.ends import apply
from spec_jax.drafters.block.heads.head import Block, Cut, scatter
from spec_jax.drafters.block.network import BlockParams
from spec_jax.models.config import require
from spec_jax.models.linear import Dense, Linear
from spec_jax.sampling.reduce import top_tokens


@flax.struct.dataclass
class SelectorParams:
    """Codebooks [vocab, rank] of the token before and of the candidate, and the rows' projection hidden -> rank."""

    predecessor: Float[Array, "vocab rank"]
    successor: Float[Array, "vocab rank"]
    projection: Linear


@dataclasses.dataclass(frozen=True)
class Selector(Cut):
    """logits of c, plus <A[previous] * W h, S[c]>, over the slot's `candidates` likeliest tokens.

    Attributes:
        rank: size of a code.
        candidates: the support, 16 as published; None scores the whole vocabulary.
    """

    rank: int = 256
    candidates: int | None = 16

    def __post_init__(self) -> None:
        """Check the settings."""
        require(isinstance(self.rank, int) and self.rank > 0, "rank", self.rank, "an integer of at least 1")
        fine = self.candidates is None or (isinstance(self.candidates, int) and self.candidates > 0)
        require(fine, "candidates", self.candidates, "an integer of at least 1, or None")

    def init(self, config: BlockConfig, key: Array) -> SelectorParams:
        """A score of zero."""
        one, two = jax.random.split(key)
        codes = 0.02 * jax.random.normal(one, (config.vocab_size, self.rank))
        projection = 0.02 * jax.random.normal(two, (config.hidden_size, self.rank))
        return SelectorParams(codes, jnp.zeros((config.logit_size, self.rank)), Dense(projection))

    def prepare(self, params: BlockParams, block: Block) -> tuple[Array, Array | None]:
        """The rows' projections, and the candidates' ids [b, d, m], -1 where there are fewer."""
        ids = None
        if self.candidates is not None:
            ids = top_tokens(block.logits, min(self.candidates, block.logits.shape[-1]))
        return apply(params.head.projection, block.normed), ids

    def start(self, params: BlockParams, block: Block) -> tuple[()]:
        """Nothing."""
        return ()

    def step(
        self, params: BlockParams, block: Block, depth: Int[Array, ""], state: Any, token: Int[Array, "b k"]
    ) -> tuple[Any, Float[Array, "b k draft_vocab"]]:
        """The candidates' scores, -inf elsewhere."""
        own: SelectorParams = params.head
        projected, ids = block.prepared
        code = own.predecessor[token] * block.row(projected, depth)[:, None]
        base = block.base(depth)
        if ids is None:
            return state, base[:, None] + (code @ own.successor.T).astype(jnp.float32)
        here = jnp.take(ids, depth, axis=1)
        known = jnp.maximum(here, 0)
        score = jnp.einsum("bkr,bmr->bkm", code, own.successor[known]).astype(jnp.float32)
        score += jnp.take_along_axis(base, known, axis=1)[:, None]
        return state, scatter(score, here, base.shape[-1])
