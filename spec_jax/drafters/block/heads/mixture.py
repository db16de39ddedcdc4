"""DBLast's latent mixture: the block's law is a mixture of products, and a node's law follows from its path."""

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
class MixtureParams:
    """weigh: the mean row -> components; low: a row -> rank; scale [components, rank]; out: rank -> draft vocab."""

    weigh: Linear
    low: Linear
    scale: Float[Array, "z rank"]
    out: Linear


@dataclasses.dataclass(frozen=True)
class Mixture(Causal):
    """q(block) = sum over z of pi_z times the product of q_z at each slot; what follows a path has the law given it.

    The state is log pi_z plus the log-chances of the path's tokens under z, so a node's law is exact: tokens drawn one
    after another are drawn from q, and p/q rules may use it. Component z's logits are the network's plus a low-rank
    bias, out(scale_z * low(h)). The mixture is DBLast's, after its abstract; how logits are made is our reading.

    Attributes:
        components: number of latent values.
        rank: of the components' biases.
    """

    components: int = 8
    rank: int = 64

    def __post_init__(self) -> None:
        """Check the settings."""
        for name in ("components", "rank"):
            value = getattr(self, name)
            require(isinstance(value, int) and value > 0, name, value, "an integer of at least 1")

    def init(self, config: BlockConfig, key: Array) -> MixtureParams:
        """Equal weights, small differences."""
        one, two, three = jax.random.split(key, 3)
        draw = lambda k, *shape: 0.02 * jax.random.normal(k, shape)  # noqa: E731
        weigh = Dense(jnp.zeros((config.hidden_size, self.components)), jnp.zeros(self.components))
        scale = jax.random.normal(three, (self.components, self.rank))
        low, out = draw(one, config.hidden_size, self.rank), draw(two, self.rank, config.logit_size)
        return MixtureParams(weigh, Dense(low), scale, Dense(out))

    def prepare(self, params: BlockParams, block: Block) -> Float[Array, "b d rank"]:
        """The predicting rows' low-rank maps."""
        return apply(params.head.low, block.normed[:, block.config.first_slot :])

    def start(self, params: BlockParams, block: Block) -> Float[Array, "b z"]:
        """The weights' logs."""
        return jax.nn.log_softmax(apply(params.head.weigh, block.normed.mean(1)).astype(jnp.float32))

    def step(
        self, params: BlockParams, block: Block, depth: Int[Array, ""], state: Any, token: Int[Array, "b k"]
    ) -> tuple[Any, Float[Array, "b k draft_vocab"]]:
        """The conditional law's logs."""
        above = self.components_at(params, block, jnp.maximum(depth - 1, 0))
        at = token if params.kept is None else jnp.argmax(params.kept == token[..., None], axis=-1)
        own = jax.vmap(lambda law, t: law[:, t].T)(above, at)
        state = state + jnp.where(depth > 0, own, 0.0)
        here = self.components_at(params, block, depth)
        return state, jax.nn.logsumexp(jax.nn.log_softmax(state)[..., None] + here[:, None], axis=2)

    def components_at(
        self, params: BlockParams, block: Block, depth: Int[Array, ""]
    ) -> Float[Array, "b z draft_vocab"]:
        """Each component's log-law at a depth."""
        low = jnp.take(block.prepared, depth, axis=1)[:, None] * params.head.scale
        bias = apply(params.head.out, low).astype(jnp.float32)
        return jax.nn.log_softmax(block.base(depth)[:, None] + bias, axis=-1)
