"""An n-gram table as a causal head: tokens that were seen to follow the one before are raised (DART, DARTree)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import flax.struct
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float, Int

from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.heads.head import Block, Causal
from spec_jax.drafters.block.network import BlockParams
from spec_jax.models.config import require


@flax.struct.dataclass
class BigramParams:
    """Each token's likeliest successors, -1 where there are fewer, and what their logits gain."""

    successors: Int[Array, "vocab m"]
    gain: Float[Array, "vocab m"]


@dataclasses.dataclass(frozen=True)
class Bigram(Causal):
    """logits + weight log(1 + count of (previous, token)): continuity as DART prunes by (arXiv 2601.19278).

    Attributes:
        weight: of the counts; DARTree's n-gram weight is 0.5.
        successors: kept of each token.
    """

    weight: float = 0.5
    successors: int = 16

    def __post_init__(self) -> None:
        """Check the settings."""
        fine = isinstance(self.successors, int) and self.successors > 0
        require(fine, "successors", self.successors, "an integer of at least 1")

    def init(self, config: BlockConfig, key: Array) -> BigramParams:
        """No token seen; `counted` makes a table from text."""
        size = (config.vocab_size, self.successors)
        return BigramParams(jnp.full(size, -1, jnp.int32), jnp.zeros(size))

    def counted(self, tokens: npt.ArrayLike, config: BlockConfig) -> BigramParams:
        """The table of a text."""
        return self.counted_in([tokens], config)

    def counted_in(self, texts: Iterable[npt.ArrayLike], config: BlockConfig) -> BigramParams:
        """The table of several texts; no pair reaches from one into the next."""
        each = [np.stack([text[:-1], text[1:]], axis=1) for text in map(np.asarray, texts)]
        every = np.concatenate([np.zeros((0, 2), np.int64), *each])
        pairs, counts = np.unique(every, axis=0, return_counts=True)
        ids = np.full((config.vocab_size, self.successors), -1, np.int32)
        gain = np.zeros(ids.shape, np.float32)
        order = np.lexsort((pairs[:, 1], -counts, pairs[:, 0]))
        pairs, counts = pairs[order], counts[order]
        places = np.arange(len(order)) - np.searchsorted(pairs[:, 0], pairs[:, 0])
        for place, (token, after), count in zip(places, pairs, counts, strict=True):
            if place < self.successors:
                ids[token, place], gain[token, place] = after, np.log1p(count)
        return BigramParams(jnp.asarray(ids), jnp.asarray(gain))

    def prepare(self, params: BlockParams, block: Block) -> None:
        """Nothing."""

    def start(self, params: BlockParams, block: Block) -> tuple[()]:
        """Nothing."""
        return ()

    def step(
        self, params: BlockParams, block: Block, depth: Int[Array, ""], state: Any, token: Int[Array, "b k"]
    ) -> tuple[Any, Float[Array, "b k draft_vocab"]]:
        """The raised logits."""
        own: BigramParams = params.head
        if params.kept is not None:
            raise ValueError("params: got a reduced vocabulary, takes the target's with an n-gram table")
        b, k = token.shape
        ids, gain = own.successors[token], self.weight * own.gain[token]
        logits = jnp.broadcast_to(block.base(depth)[:, None], (b, k, block.logits.shape[-1]))
        at = jnp.where(ids < 0, logits.shape[-1], ids)
        return state, logits.at[jnp.arange(b)[:, None, None], jnp.arange(k)[:, None], at].add(gain, mode="drop")
