"""TreeFlash's head (arXiv 2606.03819): a gated MLP of a row and the token before, in front of the target's head."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.ends import apply
from spec_jax.drafters.block.heads.head import Block, Causal
from spec_jax.drafters.block.network import BlockParams, base_logits
from spec_jax.models.config import require
from spec_jax.models.linear import Dense, Linear
from spec_jax.models.norms import rms_norm


@flax.struct.dataclass
class SwiGluParams:
    """One norm for both inputs; up_gate: [embedding; row] -> 2 inner, up first; down: inner -> hidden."""

    norm: Float[Array, "hidden"]
    up_gate: Linear
    down: Linear


@dataclasses.dataclass(frozen=True)
class SwiGlu(Causal):
    """head(norm(h + d(silu(g) * u))), where u and g are maps of the token's embedding and the row h, both normed.

    Attributes:
        inner: size of u and g.
    """

    inner: int

    def __post_init__(self) -> None:
        """Check the settings."""
        require(isinstance(self.inner, int) and self.inner > 0, "inner", self.inner, "an integer of at least 1")

    def init(self, config: BlockConfig, key: Array) -> SwiGluParams:
        """A correction of zero."""
        h = config.hidden_size
        kernel = 0.02 * jax.random.normal(key, (2 * h, 2 * self.inner))
        return SwiGluParams(jnp.ones(h), Dense(kernel, jnp.zeros(2 * self.inner)), Dense(jnp.zeros((self.inner, h))))

    def prepare(self, params: BlockParams, block: Block) -> Array:
        """The rows, normed."""
        return rms_norm(block.hidden, params.head.norm, block.config.rms_norm_eps)

    def start(self, params: BlockParams, block: Block) -> tuple[()]:
        """Nothing."""
        return ()

    def step(
        self, params: BlockParams, block: Block, depth: Int[Array, ""], state: Any, token: Int[Array, "b k"]
    ) -> tuple[Any, Float[Array, "b k draft_vocab"]]:
        """The corrected logits."""
        own, c = params.head, block.config
        e = rms_norm(params.ends.embed(token).astype(block.hidden.dtype), own.norm, c.rms_norm_eps)
        row = jnp.broadcast_to(block.row(block.prepared, depth)[:, None], e.shape)
        up, gate = jnp.split(apply(own.up_gate, jnp.concatenate([e, row], axis=-1)), 2, axis=-1)
        x = block.row(block.hidden, depth)[:, None] + apply(own.down, jax.nn.silu(gate) * up)
        return state, base_logits(c, params, rms_norm(x, params.network.norm, c.rms_norm_eps))
