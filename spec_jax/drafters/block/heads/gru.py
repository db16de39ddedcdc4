"""Domino's causal head (arXiv 2605.29707): a recurrent state of the block's tokens, and a low-rank correction."""

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
from spec_jax.drafters.block.network import BlockParams
from spec_jax.models.config import require
from spec_jax.models.linear import Dense, Linear


@flax.struct.dataclass
class Gru:
    """A gated recurrent unit without biases: `into` from the input, `across` from the state, gates r, z, n."""

    into: Linear
    across: Linear

    def __call__(self, state: Float[Array, "*b s"], x: Float[Array, "*b n"]) -> Float[Array, "*b s"]:
        """The next state."""
        r, z, n = jnp.split(apply(self.into, x), 3, axis=-1)
        r2, z2, n2 = jnp.split(apply(self.across, state), 3, axis=-1)
        r, z = jax.nn.sigmoid(r + r2), jax.nn.sigmoid(z + z2)
        return (1 - z) * jnp.tanh(n + r * n2) + z * state


def init_gru(key: Array, size: int, state: int) -> Gru:
    """A random unit, uniform as PyTorch draws it."""
    bound = state**-0.5
    draw = lambda k, n: Dense(jax.random.uniform(k, (n, 3 * state), minval=-bound, maxval=bound))  # noqa: E731
    one, two = jax.random.split(key)
    return Gru(draw(one, size), draw(two, state))


@flax.struct.dataclass
class DominoParams:
    """The unit over the target's embeddings, [hidden + state] -> low, and low -> draft vocab."""

    gru: Gru
    low: Linear
    out: Linear


@dataclasses.dataclass(frozen=True)
class Domino(Causal):
    """logits + scale W2 silu(W1 [h; s]) where s has read the anchor and the drafted tokens.

    Attributes:
        state: size of s.
        low: rank of the correction.
        pure: depths at the front that keep the network's own logits.
        scale: guidance.
    """

    state: int = 1024
    low: int = 256
    pure: int = 1
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Check the settings."""
        for name, least in {"state": 1, "low": 1, "pure": 0}.items():
            value = getattr(self, name)
            require(isinstance(value, int) and value >= least, name, value, f"an integer of at least {least}")

    def init(self, config: BlockConfig, key: Array) -> DominoParams:
        """A correction of zero."""
        one, two = jax.random.split(key)
        low = 0.02 * jax.random.normal(one, (config.hidden_size + self.state, self.low))
        out = jnp.zeros((self.low, config.logit_size))
        return DominoParams(init_gru(two, config.hidden_size, self.state), Dense(low), Dense(out))

    def prepare(self, params: BlockParams, block: Block) -> Any:
        """The rows' part of the low-rank map, for all slots at once."""
        kernel = _kernel(params.head.low)[: block.normed.shape[-1]]
        return block.normed @ kernel

    def start(self, params: BlockParams, block: Block) -> Float[Array, "b state"]:
        """Zeros."""
        return jnp.zeros((block.anchor.shape[0], self.state))

    def step(
        self, params: BlockParams, block: Block, depth: Int[Array, ""], state: Any, token: Int[Array, "b k"]
    ) -> tuple[Any, Float[Array, "b k draft_vocab"]]:
        """The corrected logits."""
        own: DominoParams = params.head
        state = own.gru(state, params.ends.embed(token).astype(state.dtype))
        low = block.row(block.prepared, depth)[:, None] + state @ _kernel(own.low)[block.normed.shape[-1] :]
        correction = apply(own.out, jax.nn.silu(low)).astype(jnp.float32)
        scale = jnp.where(depth < self.pure, 0.0, self.scale)
        return state, block.base(depth)[:, None] + scale * correction


def _kernel(linear: Linear) -> Array:
    if not isinstance(linear, Dense) or linear.bias is not None:
        raise ValueError("low: got a leaf that can't be split, takes a dense one without bias")
    return linear.kernel
