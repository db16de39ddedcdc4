"""DSpark's Markov heads (arXiv 2607.05147): a low-rank bias by the token before, and how sure the drafter is."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

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
class MarkovParams:
    """previous [vocab, rank] and bias rank -> draft vocab; mixer is the gate's or the recurrence's map.

    confidence maps a row (and the embedding of the token before) to one logit; temperature [depth] calibrates it.
    """

    previous: Float[Array, "vocab rank"]
    bias: Linear
    mixer: Linear | None = None
    confidence: Linear | None = None
    temperature: Float[Array, "depth"] | None = None


@dataclasses.dataclass(frozen=True)
class Markov(Causal):
    """logits + W2 f(W1[previous token]), left to right.

    Attributes:
        rank: size of a token's embedding.
        kind: "vanilla": f(e) = e; "gated": sigmoid(gate [h; e]) e; "rnn": a recurrent state over the block.
        confidence: what the confidence head reads: "markov": the row and e; "hidden": the row; None: there is none.
    """

    rank: int = 256
    kind: Literal["vanilla", "gated", "rnn"] = "vanilla"
    confidence: Literal["markov", "hidden"] | None = "markov"

    def __post_init__(self) -> None:
        """Check the settings."""
        require(isinstance(self.rank, int) and self.rank > 0, "rank", self.rank, "an integer of at least 1")
        require(self.kind in ("vanilla", "gated", "rnn"), "kind", self.kind, "vanilla, gated or rnn")
        known = self.confidence in ("markov", "hidden", None)
        require(known, "confidence", self.confidence, "markov, hidden or None")

    def init(self, config: BlockConfig, key: Array) -> MarkovParams:
        """A bias of zero."""
        r, h = self.rank, config.hidden_size
        keys = jax.random.split(key, 3)
        draw = lambda i, *shape: 0.02 * jax.random.normal(keys[i], shape)  # noqa: E731
        mixer = None
        if self.kind == "gated":
            mixer = Dense(draw(1, h + r, r), jnp.zeros(r))
        elif self.kind == "rnn":
            mixer = Dense(draw(1, 2 * r + h, 3 * r), jnp.zeros(3 * r))
        width = {"markov": h + r, "hidden": h, None: 0}[self.confidence]
        confidence = Dense(draw(2, width, 1), jnp.zeros(1)) if width else None
        calibration = jnp.ones(config.depth) if width else None
        return MarkovParams(
            draw(0, config.vocab_size, r), Dense(jnp.zeros((r, config.logit_size))), mixer, confidence, calibration
        )

    def prepare(self, params: BlockParams, block: Block) -> None:
        """Nothing."""

    def start(self, params: BlockParams, block: Block) -> Any:
        """The recurrence's zeros, or nothing."""
        return jnp.zeros((block.anchor.shape[0], self.rank)) if self.kind == "rnn" else ()

    def step(
        self, params: BlockParams, block: Block, depth: Int[Array, ""], state: Any, token: Int[Array, "b k"]
    ) -> tuple[Any, Float[Array, "b k draft_vocab"]]:
        """The biased logits."""
        own, e = params.head, params.head.previous[token]
        row = block.row(block.normed, depth)[:, None]
        row = jnp.broadcast_to(row, (*token.shape, row.shape[-1]))
        if self.kind == "gated":
            e = jax.nn.sigmoid(apply(own.mixer, jnp.concatenate([row, e], axis=-1))) * e
        elif self.kind == "rnn":
            gate, candidate, out = jnp.split(apply(own.mixer, jnp.concatenate([state, e, row], axis=-1)), 3, axis=-1)
            gate, e = jax.nn.sigmoid(gate), jnp.tanh(out)
            state = gate * state + (1 - gate) * jnp.tanh(candidate)
        return state, block.base(depth)[:, None] + apply(own.bias, e).astype(jnp.float32)

    def confidence_logits(
        self, params: BlockParams, block: Block, tokens: Int[Array, "b d"]
    ) -> Float[Array, "b d"] | None:
        """Before the sigmoid: the chance that each depth's token is accepted, given the tokens before; None: no head.

        tokens[:, i] precedes depth i, the anchor first. A depth's own token plays no part. The target of training is
        1 - |p - q|_1 / 2, the chance of acceptance.
        """
        own: MarkovParams = params.head
        if own.confidence is None:
            return None
        d = tokens.shape[1]
        rows = block.normed[:, block.config.first_slot :][:, :d]
        if self.confidence == "markov":
            rows = jnp.concatenate([rows, own.previous[tokens]], axis=-1)
        z = apply(own.confidence, rows)[..., 0].astype(jnp.float32)
        return z if own.temperature is None else z / own.temperature[:d]
