"""The network of an EAGLE head: pairs of a hidden state and the next token, through a decoder layer or a few.

What comes out behind a pair stands for the target's hidden state there, so it is paired with the token after that one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.drafters.block.ends import Ends, apply
from spec_jax.drafters.eagle.config import EagleConfig
from spec_jax.models.linear import Dense, Linear
from spec_jax.models.norms import rms_norm
from spec_jax.models.rope import inverse_frequencies, rotate


@flax.struct.dataclass
class Layer:
    """One layer's leaves. In the first one with joined inputs, q, k and v read [embedding; feature] and input_norm is
    the embedding's; with fused inputs it has no input_norm.
    """

    input_norm: Float[Array, "hidden"] | None
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    mlp_norm: Float[Array, "hidden"]
    gate: Linear
    up: Linear
    down: Linear
    q_norm: Float[Array, "head_dim"] | None = None
    k_norm: Float[Array, "head_dim"] | None = None


@flax.struct.dataclass
class Network:
    """What is trained, besides `EagleParams.lm_head`.

    fc: the tapped states to a feature, or [embedding; feature] to a layer's input. context_norm: the first layer's norm
    of the feature. norm: in front of the logits. feature_norms: of every tapped state, or one of all of them.
    mask_hidden: P-EAGLE's stand-in for the tapped states of tokens that are not known yet.
    """

    fc: Linear
    layers: tuple[Layer, ...]
    context_norm: Float[Array, "hidden"] | None = None
    norm: Float[Array, "hidden"] | None = None
    feature_norms: tuple[Array, ...] = ()
    mask_hidden: Float[Array, "joined"] | None = None


@flax.struct.dataclass
class EagleParams:
    """All that an EAGLE head reads: its network, the target's ends, its own map to logits if it has one, and the target
    id of each token of a reduced vocabulary.
    """

    network: Network
    ends: Ends
    lm_head: Linear | None = None
    kept: Int[Array, "draft_vocab"] | None = None


Attend = Callable[[int, Array, Array, Array], Array]
"""(layer, q [*b heads d], k [*b kv d], v [*b kv d]), q and k rotated -> [*b heads d]."""


def feature(
    config: EagleConfig, params: EagleParams, tapped: Float[Array, "*b taps hidden"]
) -> Float[Array, "*b hidden"]:
    """The head's input made of tapped hidden states: joined and projected, or behind the target's final norm."""
    c, net = config, params.network
    tapped = tapped.astype(net.layers[0].mlp_norm.dtype)
    if c.inputs == "fused":
        return params.ends.final(tapped[..., 0, :], c.final_norm_eps or c.rms_norm_eps)
    if c.feature_norm == "each":
        normed = [rms_norm(tapped[..., i, :], w, c.rms_norm_eps) for i, w in enumerate(net.feature_norms)]
        tapped = jnp.stack(normed, axis=-2)
    joined = tapped.reshape(*tapped.shape[:-2], -1)
    if c.feature_norm == "all":
        joined = rms_norm(joined, net.feature_norms[0], c.rms_norm_eps)
    return apply(net.fc, joined)


def masked_feature(config: EagleConfig, params: EagleParams) -> Float[Array, "hidden"]:
    """P-EAGLE's input where no hidden state is known yet."""
    assert params.network.mask_hidden is not None
    return feature(config, params, params.network.mask_hidden.reshape(len(config.taps), -1))


def run(
    config: EagleConfig,
    params: EagleParams,
    context: Float[Array, "*b hidden"],
    tokens: Int[Array, "*b"],
    positions: Int[Array, "*b"],
    slots: int,
    attend: Attend,
) -> Float[Array, "*b hidden"]:
    """The outputs behind pairs of a context (a feature, or an earlier output) and the token behind it.

    A pair's position is that of its feature; `slots` is the length that the rotary embedding is for.
    """
    c, net, eps = config, params.network, config.rms_norm_eps
    inv_freq, factor = inverse_frequencies(c.rope, c.head_dim, c.max_position_embeddings, slots)

    def heads(linear: Linear, x: Array, norm: Array | None, turn: bool) -> Array:
        y = apply(linear, x)
        y = y.reshape(*y.shape[:-1], -1, c.head_dim)
        y = y if norm is None else rms_norm(y, norm, eps)
        return rotate(y, positions, inv_freq, factor) if turn else y

    embedding = params.ends.embed(tokens).astype(context.dtype)
    x = apply(net.fc, jnp.concatenate([embedding, context], axis=-1)) if c.inputs == "fused" else context
    for i, leaves in enumerate(net.layers):
        if i == 0 and c.inputs == "joined":
            assert net.context_norm is not None and leaves.input_norm is not None
            normed = rms_norm(x, net.context_norm, eps)
            h = jnp.concatenate([rms_norm(embedding, leaves.input_norm, eps), normed], axis=-1)
            x = normed if c.norm_before_residual else x
        else:
            h = x if leaves.input_norm is None else rms_norm(x, leaves.input_norm, eps)
        q = heads(leaves.q, h, leaves.q_norm, True)
        k, v = heads(leaves.k, h, leaves.k_norm, True), heads(leaves.v, h, None, False)
        out = attend(i, q, k, v)
        x = x + apply(leaves.o, out.reshape(*x.shape[:-1], -1))
        h = rms_norm(x, leaves.mlp_norm, eps)
        x = x + apply(leaves.down, jax.nn.silu(apply(leaves.gate, h)) * apply(leaves.up, h))
    return rms_norm(x, net.norm, eps) if c.norm_output and net.norm is not None else x


def draft_logits(
    config: EagleConfig, params: EagleParams, outputs: Float[Array, "*b hidden"]
) -> Float[Array, "*b draft_vocab"]:
    """Logits behind outputs over the tokens that can be drafted, in float32."""
    norm = None if config.norm_output else params.network.norm
    x = outputs if norm is None else rms_norm(outputs, norm, config.rms_norm_eps)
    return params.ends.logits(x) if params.lm_head is None else apply(params.lm_head, x).astype(jnp.float32)


def full_logits(
    config: EagleConfig, params: EagleParams, logits: Float[Array, "*b draft_vocab"]
) -> Float[Array, "*b vocab"]:
    """Logits over the target's vocabulary: -inf for tokens that can't be drafted."""
    if params.kept is None:
        return logits
    return jnp.full((*logits.shape[:-1], config.vocab_size), -jnp.inf).at[..., params.kept].set(logits)


def init_network(config: EagleConfig, key: Array, dtype: Any = jnp.float32, scale: float = 0.02) -> Network:
    """Random parameters: maps normal with standard deviation `scale`, norms one, biases zero."""
    c, count, h = config, iter(range(1 << 20)), config.hidden_size

    def dense(into: int, out: int, bias: bool = False) -> Dense:
        kernel = scale * jax.random.normal(jax.random.fold_in(key, next(count)), (into, out))
        return Dense(kernel.astype(dtype), jnp.zeros(out, dtype) if bias else None)

    ones = lambda n: jnp.ones(n, dtype)  # noqa: E731

    def layer(i: int) -> Layer:
        joined, bias = i == 0 and c.inputs == "joined", c.attention_bias
        wide, q, kv = (2 if joined else 1) * h, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        return Layer(
            input_norm=None if i == 0 and c.inputs == "fused" else ones(h),
            q=dense(wide, q, bias),
            k=dense(wide, kv, bias),
            v=dense(wide, kv, bias),
            o=dense(q, h, bias),
            mlp_norm=ones(h),
            gate=dense(h, c.intermediate_size),
            up=dense(h, c.intermediate_size),
            down=dense(c.intermediate_size, h),
            q_norm=ones(c.head_dim) if c.qk_norm else None,
            k_norm=ones(c.head_dim) if c.qk_norm else None,
        )

    m = len(c.taps)
    norms = {"none": (), "each": tuple(ones(h) for _ in range(m)), "all": (ones(m * h),)}[c.feature_norm]
    mask = jax.random.normal(jax.random.fold_in(key, next(count)), (m * h,)).astype(dtype)
    return Network(
        fc=dense((2 if c.inputs == "fused" else m) * h, h, c.fc_bias),
        layers=tuple(layer(i) for i in range(c.num_layers)),
        context_norm=ones(h) if c.inputs == "joined" else None,
        norm=ones(h) if c.inputs == "joined" else None,
        feature_norms=norms,
        mask_hidden=None if c.mask_token is None else mask,
    )


def init_params(
    config: EagleConfig,
    key: Array,
    ends: Ends,
    kept: Int[Array, "draft_vocab"] | None = None,
    dtype: Any = jnp.float32,
    scale: float = 0.02,
) -> EagleParams:
    """A random network over a target's ends; its own map to logits, if it has one, begins as the target's columns.

    Raises:
        ValueError: for kept tokens that are not as many as the config says, or a head that can't be copied.
    """
    got, want = None if kept is None else kept.shape[0], config.draft_vocab_size
    if got != want:
        raise ValueError(f"kept: got {got} tokens, takes as many as draft_vocab_size says, {want}")
    lm_head = None
    if config.own_head or kept is not None:
        whole = ends.columns(kept)
        if whole.bias is not None:
            raise ValueError("ends: got a head with a bias, takes one without")
        lm_head = Dense(whole.kernel.astype(dtype))
    return EagleParams(init_network(config, key, dtype, scale), ends, lm_head, kept)
