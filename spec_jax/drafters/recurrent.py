"""A recurrent draft head on the target's last hidden state (ReDrafter, arXiv 2403.09919)."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from spec_jax.drafters.block.ends import Ends, apply
from spec_jax.drafters.head_tree import HeadTree
from spec_jax.drafters.medusa import LastHidden, Residual, hidden_before
from spec_jax.models.config import check_types
from spec_jax.models.linear import Dense, Linear
from spec_jax.topology.branching import Branching
from spec_jax.topology.coupling import Learner
from spec_jax.topology.growth import Growth
from spec_jax.tree import Tree


@dataclasses.dataclass(frozen=True)
class RecurrentConfig:
    """The sizes of a recurrent head. Raises ValueError, naming the field, for anything that does not fit.

    Attributes:
        vocab_size, hidden_size: the target's; the recurrent state has hidden_size numbers too.
        num_blocks: residual blocks between state and logits.
        final_norm_eps: of the target's final norm, behind which the hidden state is read.
    """

    vocab_size: int
    hidden_size: int
    num_blocks: int = 2
    final_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        """Check every field."""
        check_types(RecurrentConfig, vars(self))


@flax.struct.dataclass
class RecurrentParams:
    """The cell's two maps, the blocks over [state; hidden] and the map to logits, which are trained; the target's ends.

    `across` is applied to the state before, `into`, with a bias, to a token's embedding.
    """

    across: Linear
    into: Linear
    blocks: tuple[Residual, ...]
    output: Linear
    ends: Ends


@dataclasses.dataclass(frozen=True)
class RecurrentHead(LastHidden):
    """The head as `HeadTree` takes it. Its context is [s; h]: the recurrent state, and the target's hidden state.

    Behind the last committed pair s is the anchor's embedding, and h stays what it is; a drafted token with embedding
    e moves s to silu(across s + into e).
    """

    config: RecurrentConfig

    def init(self, params: RecurrentParams, batch: int, max_len: int) -> tuple[tuple[()], Float[Array, "b both"]]:
        """Nothing, and zeros."""
        return (), jnp.zeros((batch, 2 * self.config.hidden_size), params.ends.norm.dtype)

    def context(self, params: RecurrentParams, taken: Float[Array, "b n hidden"]) -> Float[Array, "b n both"]:
        """No state yet, and the target's behind its final norm."""
        hidden = params.ends.final(taken, self.config.final_norm_eps)
        return jnp.concatenate([jnp.zeros_like(hidden), hidden], axis=-1)

    def score(
        self,
        params: RecurrentParams,
        state: tuple[()],
        context: Float[Array, "b n both"],
        tree: Tree,
        staged: Any = None,
        nodes: tuple[Int[Array, ""] | int, int] | None = None,
    ) -> tuple[Float[Array, "b n both"], tuple[()]]:
        """The context behind each pair: a committed one begins, a drafted one (`nodes`) goes on."""
        before, hidden = jnp.split(context, 2, axis=-1)
        if nodes is None:
            s = params.ends.embed(tree.tokens).astype(context.dtype)
        else:
            tokens = lax.dynamic_slice_in_dim(tree.tokens, *nodes, axis=1)
            s = step(params, before, tokens)
        return jnp.concatenate([s, hidden], axis=-1), ()

    def logits(self, params: RecurrentParams, context: Float[Array, "b n both"]) -> Float[Array, "b n vocab"]:
        """Behind contexts."""
        return head_logits(params, context)


def step(
    params: RecurrentParams, state: Float[Array, "*b hidden"], token: Int[Array, "*b"]
) -> Float[Array, "*b hidden"]:
    """The recurrent state behind one more token."""
    embedded = params.ends.embed(token).astype(state.dtype)
    return jax.nn.silu(apply(params.across, state) + apply(params.into, embedded))


def head_logits(params: RecurrentParams, context: Float[Array, "*b both"]) -> Float[Array, "*b vocab"]:
    """Logits behind [s; h]."""
    for block in params.blocks:
        context = block(context)
    return apply(params.output, context).astype(jnp.float32)


def text_logits(
    config: RecurrentConfig,
    params: RecurrentParams,
    features: Float[Array, "b t taps hidden"],
    tokens: Int[Array, "b t"],
    anchors: Int[Array, "b a"],
    blocks: Int[Array, "b a d"],
) -> Float[Array, "b a d vocab"]:
    """What the head says behind anchors at text positions 1 .. t - 1, given the right tokens `blocks` behind each.

    Differentiable. Logits of depth i are for blocks[..., i]; an anchor at position 0 has no hidden state: zeros.
    """
    hidden = hidden_before(config, params.ends, features, anchors)
    s = params.ends.embed(jnp.take_along_axis(tokens, anchors, axis=1)).astype(hidden.dtype)
    found = []
    for i in range(blocks.shape[2]):
        s = s if i == 0 else step(params, s, blocks[..., i - 1])
        found.append(head_logits(params, jnp.concatenate([s, hidden], axis=-1)))
    return jnp.where((anchors > 0)[:, :, None, None], jnp.stack(found, axis=2), 0.0)


def init_params(
    config: RecurrentConfig, key: Array, ends: Ends, dtype: Any = jnp.float32, scale: float = 0.02
) -> RecurrentParams:
    """Random maps; the logits begin as the target's own of the hidden state."""
    h, (a, b) = config.hidden_size, jax.random.split(key)
    draw = lambda key: (scale * jax.random.normal(key, (h, h))).astype(dtype)  # noqa: E731
    still = Residual(Dense(jnp.zeros((2 * h, 2 * h), dtype), jnp.zeros(2 * h, dtype)))
    own = ends.columns().kernel.astype(dtype)
    output = Dense(jnp.concatenate([jnp.zeros_like(own), own]))
    into = Dense(draw(b), jnp.zeros(h, dtype))
    return RecurrentParams(Dense(draw(a)), into, (still,) * config.num_blocks, output, ends)


def drafter(config: RecurrentConfig, shape: Growth | Branching, learner: Learner | None = None) -> HeadTree:
    """A drafter for `medusa.tapped(config, target)`; its parameters are `RecurrentParams`."""
    return HeadTree(RecurrentHead(config), shape, learner or Learner())
