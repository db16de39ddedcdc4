"""Hydra++'s prefix attention (arXiv 2402.05109): a decoder layer over the target's hidden states of the whole text."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax import tree as trees
from spec_jax.drafters import pair_cache
from spec_jax.drafters.pair_cache import PairCache
from spec_jax.models import layers
from spec_jax.models.config import LlamaConfig, require
from spec_jax.models.linear import Dense
from spec_jax.models.llama import AttentionState, Layer, Llama, StagedRows
from spec_jax.models.norms import rms_norm
from spec_jax.tree import Tree


@flax.struct.dataclass
class Prefix:
    """The layer, and the norm behind it: a Llama of one layer without its ends."""

    layer: Layer
    norm: Float[Array, "hidden"]


@dataclasses.dataclass(frozen=True)
class PrefixReader(PairCache):
    """What a head's state is with such a layer in front (its config's `prefix`): the layer's committed keys and values.

    Only states of committed tokens are read, so nothing drafted is ever in the cache. A head's context is what comes
    out behind the last one, in the place of the target's normed hidden state.
    """

    config: Any

    def init(self, params: Any, batch: int, max_len: int) -> tuple[AttentionState, Float[Array, "b hidden"]]:
        """No states, room for those of a text, and zeros."""
        c, dtype = self.config.prefix, params.ends.norm.dtype
        return pair_cache.empty(c, batch, max_len, dtype), jnp.zeros((batch, c.hidden_size), dtype)

    def score(
        self,
        params: Any,
        state: AttentionState,
        context: Float[Array, "b n hidden"],
        tree: Tree,
        staged: Any = None,
        nodes: tuple[Int[Array, ""] | int, int] | None = None,
    ) -> tuple[Float[Array, "b n hidden"], StagedRows]:
        """What comes out behind the target's normed hidden states, which follow the committed ones as the tree says."""
        return run(self.config.prefix, params.prefix, state, context, tree.parent)


def run(
    config: LlamaConfig,
    prefix: Prefix,
    state: AttentionState,
    hidden: Float[Array, "b n hidden"],
    parent: Int[Array, "b n"],
) -> tuple[Float[Array, "b n hidden"], StagedRows]:
    """The layer and its norm over hidden states behind those of a state; outputs, and the rows to commit."""
    reach, model = jax.vmap(trees.ancestors)(parent), Llama(config)
    position = state.length[:, None] + reach.sum(-1, dtype=jnp.int32) - 1
    old = model.stage(state, hidden.shape[1])
    out, rows = layers.run(model.layer(state, position, reach), hidden, (prefix.layer,), state.k, state.v, old.k, old.v)
    return rms_norm(out[-1], prefix.norm, config.rms_norm_eps), StagedRows(*zip(*rows, strict=True))


def text(config: LlamaConfig, prefix: Prefix, hidden: Float[Array, "b t hidden"]) -> Float[Array, "b t hidden"]:
    """What comes out behind every hidden state of whole texts. Differentiable where no kernel is chosen."""
    b, t, _ = hidden.shape
    parent = jnp.broadcast_to(jnp.arange(-1, t - 1, dtype=jnp.int32), (b, t))
    return run(config, prefix, pair_cache.empty(config, b, t, hidden.dtype), hidden, parent)[0]


def check(config: LlamaConfig, hidden_size: int) -> None:
    """ValueError for a Llama that is no such layer: of another hidden size, more layers, with biases or a window."""
    require(
        config.hidden_size == hidden_size, "prefix", f"one of hidden_size {config.hidden_size}", f"one of {hidden_size}"
    )
    for name, only in (("num_layers", 1), ("attention_bias", False), ("mlp_bias", False), ("sliding_window", None)):
        require(getattr(config, name) == only, "prefix", f"one with {name} {getattr(config, name)}", str(only))


def init_prefix(config: LlamaConfig, key: Array, dtype: Any = jnp.float32, scale: float = 0.02) -> Prefix:
    """A random layer that begins by adding nothing to the hidden states, and a norm of ones."""
    h, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    keys = iter(jax.random.split(key, 5))
    draw = lambda *shape: Dense((scale * jax.random.normal(next(keys), shape)).astype(dtype))  # noqa: E731
    zero = lambda *shape: Dense(jnp.zeros(shape, dtype))  # noqa: E731
    ones = jnp.ones(h, dtype)
    maps = {"q": draw(h, q), "k": draw(h, kv), "v": draw(h, kv), "o": zero(q, h)}
    maps |= {"gate": draw(h, inner), "up": draw(h, inner), "down": zero(inner, h)}
    return Prefix(Layer(attention_norm=ones, mlp_norm=ones, **maps), ones)
