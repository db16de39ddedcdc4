"""Weaver (arXiv 2607.06763): a tiny transformer over a node's ancestors that scores candidates of the next slot."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.ends import apply
from spec_jax.drafters.block.heads.head import Block, Cut, scatter
from spec_jax.drafters.block.network import BlockParams
from spec_jax.models.config import require
from spec_jax.models.linear import Dense, Linear
from spec_jax.models.norms import rms_norm
from spec_jax.models.rope import rotate
from spec_jax.sampling.reduce import top_tokens

EPS = 1e-6


@flax.struct.dataclass
class Norm:
    """A root-mean-square norm with a bias."""

    weight: Float[Array, "n"]
    bias: Float[Array, "n"]

    def __call__(self, x: Float[Array, "*b n"]) -> Float[Array, "*b n"]:
        """Apply it."""
        return rms_norm(x, self.weight, EPS) + self.bias


@flax.struct.dataclass
class AncestorLayer:
    """A pre-norm layer: joined queries, keys and values; a SwiGLU, gate first."""

    attention_norm: Norm
    qkv: Linear
    out: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear


@flax.struct.dataclass
class AncestorParams:
    """Norms and maps of hidden states and embeddings into the adapter, its layers, and its query to the head."""

    row_norm: Norm
    row_in: Linear
    token_norm: Norm
    token_in: Linear
    layers: tuple[AncestorLayer, ...]
    out_norm: Norm
    query: Linear


@dataclasses.dataclass(frozen=True)
class Ancestor(Cut):
    """logits of a candidate, plus <query(path), its row of the target's head>; -inf for what is no candidate.

    The adapter reads, once a block, the target's last hidden state and the network's rows (the prefix), and then each
    node's token over the prefix and the node's ancestors, whose keys and values are the node's state.

    Attributes:
        size: of the adapter.
        layers: how many.
        heads: of attention.
        inner: the MLP's size.
        candidates: each slot's likeliest tokens that are scored; None: all.
        theta: of the rotary embedding.
    """

    size: int = 2048
    layers: int = 1
    heads: int = 16
    inner: int = 2048
    candidates: int | None = 512
    theta: float = 1e4
    final_tap: bool = dataclasses.field(default=True, init=False)

    def __post_init__(self) -> None:
        """Check the settings."""
        for name in ("size", "layers", "heads", "inner"):
            value = getattr(self, name)
            require(isinstance(value, int) and value > 0, name, value, "an integer of at least 1")
        require(self.size % (2 * self.heads) == 0, "heads", self.heads, "a number that divides size / 2")

    def init(self, config: BlockConfig, key: Array) -> AncestorParams:
        """A residual of zero."""
        d, h = self.size, config.hidden_size
        keys = iter(jax.random.split(key, 4 * self.layers + 2))
        draw = lambda into, out: 0.02 * jax.random.normal(next(keys), (into, out))  # noqa: E731
        norm = lambda n: Norm(jnp.ones(n), jnp.zeros(n))  # noqa: E731

        def layer() -> AncestorLayer:
            gate_up = Dense(draw(d, 2 * self.inner), jnp.zeros(2 * self.inner))
            down = Dense(draw(self.inner, d), jnp.zeros(d))
            return AncestorLayer(norm(d), Dense(draw(d, 3 * d)), Dense(draw(d, d)), norm(d), gate_up, down)

        return AncestorParams(
            row_norm=norm(h),
            row_in=Dense(draw(h, d), jnp.zeros(d)),
            token_norm=norm(h),
            token_in=Dense(draw(h, d), jnp.zeros(d)),
            layers=tuple(layer() for _ in range(self.layers)),
            out_norm=norm(d),
            query=Dense(jnp.zeros((d, h))),
        )

    def prepare(self, params: BlockParams, block: Block) -> tuple[list[tuple[Array, Array]], Array | None]:
        """Each layer's keys and values of the prefix, and the candidates' ids."""
        own: AncestorParams = params.head
        last = params.ends.final(block.feature[:, -1], block.config.rms_norm_eps)
        rows = jnp.concatenate([last[:, None], block.normed[:, block.config.first_slot :]], axis=1)
        x = apply(own.row_in, own.row_norm(rows.astype(jnp.float32)))
        n = x.shape[1]
        causal, kept = jnp.tril(jnp.ones((n, n), bool)), []
        for leaves in own.layers:
            q, k, v = self._qkv(leaves, x, jnp.arange(n))
            kept.append((k, v))
            x = self._finish(leaves, x, _attend(q, k, v, causal))
        ids = None
        if self.candidates is not None:
            ids = top_tokens(block.logits, min(self.candidates, block.logits.shape[-1]))
        return kept, ids

    def start(self, params: BlockParams, block: Block) -> tuple[tuple[Array, Array], ...]:
        """Each layer's keys and values of no ancestors."""
        shape = (block.anchor.shape[0], block.config.depth, self.heads, self.size // self.heads)
        return tuple((jnp.zeros(shape), jnp.zeros(shape)) for _ in range(self.layers))

    def step(
        self, params: BlockParams, block: Block, depth: Int[Array, ""], state: Any, token: Int[Array, "b k"]
    ) -> tuple[Any, Float[Array, "b k draft_vocab"]]:
        """The candidates' logits."""
        own: AncestorParams = params.head
        kept, ids = block.prepared
        x = apply(own.token_in, own.token_norm(params.ends.embed(token).astype(jnp.float32)))
        seen, new = jnp.arange(block.config.depth) <= depth, []
        for leaves, (prefix_k, prefix_v), (k_rows, v_rows) in zip(own.layers, kept, state, strict=True):
            q, k, v = self._qkv(leaves, x, depth + 1)
            k_rows, v_rows = k_rows.at[:, :, depth].set(k), v_rows.at[:, :, depth].set(v)
            new.append((k_rows, v_rows))
            x = self._finish(leaves, x, _attend_path(q, prefix_k, prefix_v, k_rows, v_rows, seen))
        query = apply(own.query, own.out_norm(x))
        base = block.base(depth)
        if ids is None:
            return tuple(new), base[:, None] + self._head(params, query)
        here = jnp.take(ids, depth, axis=1)
        known = jnp.maximum(here, 0)
        residual = self._head(params, query, known) + jnp.take_along_axis(base, known, axis=1)[:, None]
        return tuple(new), scatter(residual, here, base.shape[-1])

    def _head(self, params: BlockParams, query: Array, ids: Array | None = None) -> Array:
        """The query's products with rows of the head, those of some draft tokens or all."""
        if params.lm_head is not None:
            every = apply(params.lm_head, query).astype(jnp.float32)
            return every if ids is None else jnp.take_along_axis(every, ids[:, None], axis=-1)
        return params.ends.logits(query) if ids is None else params.ends.some_logits(query, ids)

    def _qkv(self, leaves: AncestorLayer, x: Array, position: Array) -> tuple[Array, Array, Array]:
        b, n, d = x.shape
        q, k, v = (
            y.reshape(b, n, self.heads, -1) for y in jnp.split(apply(leaves.qkv, leaves.attention_norm(x)), 3, axis=-1)
        )
        size = d // self.heads
        inv_freq = np.float32(self.theta) ** -(np.arange(0, size, 2, dtype=np.float32) / size)
        at = jnp.broadcast_to(position, (b, n))
        return rotate(q, at, inv_freq), rotate(k, at, inv_freq), v

    def _finish(self, leaves: AncestorLayer, x: Array, attended: Array) -> Array:
        x = x + apply(leaves.out, attended.reshape(x.shape))
        gate, up = jnp.split(apply(leaves.gate_up, leaves.mlp_norm(x)), 2, axis=-1)
        return x + apply(leaves.down, jax.nn.silu(gate) * up)


def _attend(q: Array, k: Array, v: Array, mask: Array) -> Array:
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, logits, -jnp.inf)), v)


def _attend_path(q: Array, prefix_k: Array, prefix_v: Array, k: Array, v: Array, seen: Array) -> Array:
    """Nodes over the prefix, which they share, and over their own paths' rows [b, k, d, heads, size]."""
    scale, n = q.shape[-1] ** -0.5, prefix_k.shape[1]
    far = jnp.einsum("bqhd,bnhd->bhqn", q, prefix_k) * scale
    near = jnp.where(seen, jnp.einsum("bqhd,bqmhd->bhqm", q, k) * scale, -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate([far, near], axis=-1))
    out = jnp.einsum("bhqn,bnhd->bqhd", weights[..., :n], prefix_v)
    return out + jnp.einsum("bhqm,bqmhd->bqhd", weights[..., n:], v)
