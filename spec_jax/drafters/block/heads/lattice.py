"""LiLiCorr (arXiv 2608.20530): each candidate of each slot gets an "in" and an "out" vector; neighbours must fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.ends import apply
from spec_jax.drafters.block.heads.head import Block, Causal, scatter
from spec_jax.drafters.block.network import BlockParams, fused_features
from spec_jax.models.config import require
from spec_jax.models.linear import Dense, Linear
from spec_jax.models.norms import rms_norm
from spec_jax.sampling.reduce import top_tokens

EPS = 1e-6


@flax.struct.dataclass
class LatticeLayer:
    """A pre-norm layer over the lattice, without an order of its own; biases say how far slots are apart."""

    attention_norm: Float[Array, "n"]
    qkv: Linear
    out: Linear
    apart: Float[Array, "heads offsets"]
    same: Float[Array, "heads"]
    mlp_norm: Float[Array, "n"]
    up: Linear
    down: Linear


@flax.struct.dataclass
class LatticeParams:
    """A node's inputs, the layers, and the maps from nodes and the anchor's context to factors and vectors."""

    token: Linear
    row: Linear
    features_in: Linear
    features_out: Linear
    slot: Float[Array, "d n"]
    rank: Float[Array, "m n"]
    layers: tuple[LatticeLayer, ...]
    norm: Float[Array, "n"]
    context: Linear
    context_norm: Float[Array, "n"]
    factors: Linear
    enter: Linear
    leave: Linear
    anchor: Linear


@dataclasses.dataclass(frozen=True)
class Lattice(Causal):
    """scale <out of the token before, in of a candidate>, unit vectors, over each slot's best few tokens.

    One bidirectional pass over the lattice of candidates gives all vectors; what follows a node is then looked up. The
    scores stand alone: the network's logits are an input of the pass, not added again. A token before that was no
    candidate leaves the network's own logits of the candidates.

    The pass is written after the published configuration's fields; what these leave open (the layers' MLP, the maps'
    biases) is our choice.

    Attributes:
        candidates: of each slot.
        size: of a node.
        layers: how many.
        heads: of attention.
        ratio: the MLPs' inner size in sizes.
        factor: size of the vectors.
        scale: largest score.
        eps: floor of a vector's length.
    """

    candidates: int = 8
    size: int = 1024
    layers: int = 2
    heads: int = 8
    ratio: float = 2.0
    factor: int = 1024
    scale: float = 8.0
    eps: float = 1e-4

    def __post_init__(self) -> None:
        """Check the settings."""
        for name in ("candidates", "size", "layers", "heads", "factor"):
            value = getattr(self, name)
            require(isinstance(value, int) and value > 0, name, value, "an integer of at least 1")
        require(self.size % self.heads == 0, "heads", self.heads, "a divisor of size")

    def init(self, config: BlockConfig, key: Array) -> LatticeParams:
        """Random maps."""
        n, h, f, d = self.size, config.hidden_size, self.factor, config.depth
        keys = iter(jax.random.split(key, 12 + 4 * self.layers))
        draw = lambda *shape: 0.02 * jax.random.normal(next(keys), shape)  # noqa: E731
        inner = int(n * self.ratio)

        def layer() -> LatticeLayer:
            apart, same = jnp.zeros((self.heads, 2 * d - 1)), jnp.zeros(self.heads)
            mlp = (Dense(draw(n, inner)), Dense(draw(inner, n)))
            return LatticeLayer(jnp.ones(n), Dense(draw(n, 3 * n)), Dense(draw(n, n)), apart, same, jnp.ones(n), *mlp)

        return LatticeParams(
            token=Dense(draw(h, n)),
            row=Dense(draw(h, n)),
            features_in=Dense(draw(5, n), jnp.zeros(n)),
            features_out=Dense(draw(n, n), jnp.zeros(n)),
            slot=draw(d, n),
            rank=draw(self.candidates, n),
            layers=tuple(layer() for _ in range(self.layers)),
            norm=jnp.ones(n),
            context=Dense(draw(h, n)),
            context_norm=jnp.ones(n),
            factors=Dense(draw(3 * n, f)),
            enter=Dense(draw(f, f)),
            leave=Dense(draw(f, f)),
            anchor=Dense(draw(n, f)),
        )

    def prepare(self, params: BlockParams, block: Block) -> tuple[Array, Array, Array, Array]:
        """The candidates' ids [b, d, m], their "in" and "out" vectors, and the anchor's "out" vector."""
        own, c = params.head, block.config
        b, d, vocab = block.logits.shape
        m = min(self.candidates, vocab)
        ids = jnp.maximum(top_tokens(block.logits, m), 0)
        tokens = ids if params.kept is None else params.kept[ids]
        log = jnp.take_along_axis(jax.nn.log_softmax(block.logits, axis=-1), ids, axis=2)
        rank = jnp.broadcast_to(jnp.arange(m) / max(1, m - 1), log.shape)
        top = jnp.broadcast_to(jnp.arange(m) == 0, log.shape)
        seen = jnp.stack([log, jnp.exp(log), log - log[:, :, :1], rank, top], axis=-1)
        seen = jax.nn.standardize(seen, axis=-1, epsilon=1e-5)
        x = apply(own.token, params.ends.embed(tokens).astype(jnp.float32))
        x += apply(own.row, block.normed[:, c.first_slot :].astype(jnp.float32))[:, :, None]
        x += apply(own.features_out, jax.nn.silu(apply(own.features_in, seen)))
        x = (x + own.slot[:, None] + own.rank[:m]).reshape(b, d * m, -1)
        slot = jnp.repeat(jnp.arange(d), m)
        for leaves in own.layers:
            x = self._layer(leaves, x, slot)
        x = rms_norm(x, own.norm, EPS)
        context = fused_features(c, params.network, block.feature[:, None, : len(c.taps)])[:, 0]
        a = rms_norm(apply(own.context, context.astype(jnp.float32)), own.context_norm, EPS)
        beside = jnp.broadcast_to(a[:, None], x.shape)
        factors = jax.nn.silu(apply(own.factors, jnp.concatenate([x, beside, x * beside], axis=-1)))
        enter, leave = (self._unit(apply(map_, factors)).reshape(b, d, m, -1) for map_ in (own.enter, own.leave))
        return ids, enter, leave, self._unit(apply(own.anchor, a))

    def start(self, params: BlockParams, block: Block) -> tuple[()]:
        """Nothing."""
        return ()

    def step(
        self, params: BlockParams, block: Block, depth: Int[Array, ""], state: Any, token: Int[Array, "b k"]
    ) -> tuple[Any, Float[Array, "b k draft_vocab"]]:
        """The candidates' scores, -inf elsewhere."""
        ids, enter, leave, anchor = block.prepared
        base, above = block.base(depth), jnp.maximum(depth - 1, 0)
        before = jnp.take(ids, above, axis=1)
        tokens = before if params.kept is None else params.kept[before]
        hit = token[:, :, None] == tokens[:, None]
        out = jnp.einsum("bkm,bmf->bkf", hit.astype(leave.dtype), jnp.take(leave, above, axis=1))
        out = jnp.where(depth == 0, anchor[:, None], out)
        score = self.scale * jnp.einsum("bkf,bmf->bkm", out, jnp.take(enter, depth, axis=1))
        here = jnp.take(ids, depth, axis=1)
        known = hit.any(-1, keepdims=True) | (depth == 0)
        score = jnp.where(known, score, jnp.take_along_axis(base, here, axis=1)[:, None])
        return state, scatter(score, here, base.shape[-1])

    def _layer(self, leaves: LatticeLayer, x: Array, slot: Array) -> Array:
        b, n, size = x.shape
        heads = lambda y: y.reshape(b, n, self.heads, -1)  # noqa: E731
        normed = rms_norm(x, leaves.attention_norm, EPS)
        q, k, v = (heads(y) for y in jnp.split(apply(leaves.qkv, normed), 3, axis=-1))
        apart = slot[:, None] - slot
        bias = leaves.apart[:, apart + (leaves.apart.shape[1] - 1) // 2] + leaves.same[:, None, None] * (apart == 0)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5 + bias)
        out = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        x = x + apply(leaves.out, out.reshape(b, n, size))
        return x + apply(leaves.down, jax.nn.gelu(apply(leaves.up, rms_norm(x, leaves.mlp_norm, EPS))))

    def _unit(self, x: Array) -> Array:
        return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), self.eps)
