"""DeLS-Spec's local head (arXiv 2607.07409): a small language model of the block's own tokens, less their frequency."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float, Int

from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.ends import apply
from spec_jax.drafters.block.heads.gru import Gru, init_gru
from spec_jax.drafters.block.heads.head import Block, Causal
from spec_jax.drafters.block.network import BlockParams
from spec_jax.models.config import require
from spec_jax.models.linear import Dense, Linear


@flax.struct.dataclass
class LocalParams:
    """The language model (a unit over the target's embeddings and a map to low, or a table of codes); log-frequencies.

    out: low -> draft vocab; log_unigram [draft vocab].
    """

    out: Linear
    log_unigram: Float[Array, "draft_vocab"]
    gru: Gru | None = None
    low: Linear | None = None
    codes: Float[Array, "vocab low"] | None = None


@dataclasses.dataclass(frozen=True)
class Local(Causal):
    """logits + alpha local(drafted tokens) - beta log unigram; the first token is the network's alone.

    The local model reads the block's drafted tokens and nothing else, so it is trained without the target, on any text.
    Frequencies are taken off as both models hold them.

    Attributes:
        low: rank of the local model's logits.
        kind: "gru": a recurrent state of all drafted tokens; "markov": the last one.
        state: size of the recurrent state.
        alpha: weight of the local model, of all depths or one after another.
        beta: weight of the frequencies, likewise.
        silu: whether the low-rank map of the state has an activation behind it.
    """

    low: int = 256
    kind: Literal["gru", "markov"] = "gru"
    state: int = 1024
    alpha: float | tuple[float, ...] = 0.3
    beta: float | tuple[float, ...] = 0.3
    silu: bool = True

    def __post_init__(self) -> None:
        """Check the settings."""
        require(self.kind in ("gru", "markov"), "kind", self.kind, "gru or markov")
        for name in ("low", "state"):
            value = getattr(self, name)
            require(isinstance(value, int) and value > 0, name, value, "an integer of at least 1")

    def init(self, config: BlockConfig, key: Array) -> LocalParams:
        """Even logits and frequencies."""
        one, two = jax.random.split(key)
        size = config.logit_size
        out, even = Dense(jnp.zeros((self.low, size))), jnp.full(size, -jnp.log(float(size)))
        if self.kind == "markov":
            return LocalParams(out, even, codes=0.02 * jax.random.normal(one, (config.vocab_size, self.low)))
        low = Dense(0.02 * jax.random.normal(one, (self.state, self.low)))
        return LocalParams(out, even, init_gru(two, config.hidden_size, self.state), low)

    def prepare(self, params: BlockParams, block: Block) -> None:
        """Nothing."""

    def start(self, params: BlockParams, block: Block) -> Any:
        """The empty state, or nothing."""
        return jnp.zeros((block.anchor.shape[0], self.state)) if self.kind == "gru" else ()

    def step(
        self, params: BlockParams, block: Block, depth: Int[Array, ""], state: Any, token: Int[Array, "b k"]
    ) -> tuple[Any, Float[Array, "b k draft_vocab"]]:
        """The combined logits; the anchor is not read."""
        own: LocalParams = params.head
        state, local = self.local(params, state, token)
        if self.kind == "gru":
            state = jnp.where(depth > 0, state, 0.0)
        size = block.config.depth
        weight = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.float32), (size,)).at[0].set(0.0)[depth]  # noqa: E731
        bias = weight(self.alpha) * local - weight(self.beta) * own.log_unigram
        return state, block.base(depth)[:, None] + bias

    def local(
        self, params: BlockParams, state: Any, token: Int[Array, "b k"]
    ) -> tuple[Any, Float[Array, "b k draft_vocab"]]:
        """The local model alone: its state and logits behind one more token (next-token loss trains it)."""
        own: LocalParams = params.head
        if own.gru is None or own.low is None:
            assert own.codes is not None
            return state, apply(own.out, own.codes[token]).astype(jnp.float32)
        state = own.gru(state, params.ends.embed(token).astype(state.dtype))
        low = apply(own.low, state)
        return state, apply(own.out, jax.nn.silu(low) if self.silu else low).astype(jnp.float32)


def log_unigram(counts: npt.ArrayLike) -> Float[Array, "draft_vocab"]:
    """Log-frequencies of tokens from their counts, with one added to each."""
    smooth = np.asarray(counts, np.float64) + 1
    return jnp.asarray(np.log(smooth / smooth.sum()), jnp.float32)
