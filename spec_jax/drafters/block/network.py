"""The block-parallel network (DFlash, arXiv 2602.06036): masked slots over the target's features as extra keys.

Tapped hidden states of the target, joined and projected, are the context. Every layer turns them into keys and values
beside those of the block's own rows, so a committed token costs no pass of the network and nothing is ever cropped:
only committed context is kept, and a block's keys are used once.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.drafters.block import attention, carry, conv
from spec_jax.drafters.block.carry import Carried, Retrace
from spec_jax.drafters.block.config import SLIDING, BlockConfig
from spec_jax.drafters.block.conv import Conv
from spec_jax.drafters.block.ends import Ends, apply
from spec_jax.models.attention import kept_slots
from spec_jax.models.linear import Dense, Linear
from spec_jax.models.norms import rms_norm
from spec_jax.models.rope import inverse_frequencies, rotate


@flax.struct.dataclass
class Layer:
    """One layer's leaves; the convolutions are None without DFlash 2."""

    attention_norm: Float[Array, "hidden"]
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: Float[Array, "head_dim"]
    k_norm: Float[Array, "head_dim"]
    mlp_norm: Float[Array, "hidden"]
    gate: Linear
    up: Linear
    down: Linear
    attention_conv: Conv | None = None
    mlp_conv: Conv | None = None


@flax.struct.dataclass
class Network:
    """The network's own parameters: what is trained, with the head's.

    mix: with per-layer features, each layer's weights of the tapped layers, before a softmax. marker and retrace are
    what `carry` adds for rejected places, by the config's `rejected`.
    """

    fc: Linear
    feature_norm: Float[Array, "hidden"]
    layers: tuple[Layer, ...]
    norm: Float[Array, "hidden"]
    mix: Float[Array, "layers taps"] | None = None
    marker: Float[Array, "hidden"] | None = None
    retrace: Retrace | None = None


@flax.struct.dataclass
class BlockParams:
    """All that a block drafter reads: the network, its causal head's parameters, and the target's ends.

    lm_head and kept: a reduced vocabulary's own head, and the target id of each of its tokens.
    """

    network: Network
    ends: Ends
    head: Any = None
    lm_head: Linear | None = None
    kept: Int[Array, "draft_vocab"] | None = None


@flax.struct.dataclass
class Context:
    """Each layer's keys and values of committed tokens, [b, kv, slots, head_dim], and how many.

    `room` is the slots that a whole text takes; a sliding layer's cache of fewer is a ring (see `models.attention`).
    """

    k: tuple[Float[Array, "b kv _ d"], ...]
    v: tuple[Float[Array, "b kv _ d"], ...]
    length: Int[Array, "b"]
    room: int = flax.struct.field(pytree_node=False)


def empty_context(config: BlockConfig, batch: int, room: int, dtype: Any) -> Context:
    """No tokens, with room for `room` of them; sliding layers keep fewer (`kept_slots`)."""

    def empty() -> tuple[Array, ...]:
        slots = (kept_slots(room, _window(config, i)) for i in range(config.num_layers))
        return tuple(jnp.zeros((batch, config.num_kv_heads, s, config.head_dim), dtype) for s in slots)

    return Context(empty(), empty(), jnp.zeros(batch, jnp.int32), room)


def context_rows(
    config: BlockConfig,
    network: Network,
    features: Float[Array, "b n taps hidden"],
    positions: Int[Array, "b n"],
    slots: int,
    marker: Float[Array, "hidden"] | None = None,
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Every layer's keys and values [b, n, kv, head_dim] of tapped features at text positions.

    `slots` is the length that the rotary embedding is for (see `inverse_frequencies`); `marker` is added to what the
    layers make them of.
    """
    contexts = _contexts(config, network, features)
    if marker is not None:
        contexts = [(leaves, x + marker) for leaves, x in contexts]
    made = [_keys_values(config, leaves, x, positions, slots) for leaves, x in contexts]
    return tuple(k for k, _ in made), tuple(v for _, v in made)


def draft_rows(
    config: BlockConfig,
    network: Network,
    inputs: Float[Array, "b s hidden"],
    context: Context,
    carried: Carried | None = None,
) -> Float[Array, "b s hidden"]:
    """The last layer's outputs for a block of embedded slots at positions context.length .. ; before the final norm."""
    s, room = inputs.shape[1], context.room
    positions = context.length[:, None] + jnp.arange(s)
    inputs, extra, seen = _carried(config, network, inputs, positions, room, carried)

    def mix(index: int, leaves: Layer, x: Array) -> Array:
        q = _queries(config, leaves, x, positions, room)
        k, v = _joined(extra, index, _keys_values(config, leaves, x, positions, room))
        own = (context.k[index], context.v[index], context.length, k.swapaxes(1, 2), v.swapaxes(1, 2))
        ring = own[0].shape[2] < room
        return attention.attend(q, *own, config.causal[index], _window(config, index), ring, seen)

    return _layers(config, network, inputs, mix)


def draft_text(
    config: BlockConfig,
    network: Network,
    inputs: Float[Array, "b a s hidden"],
    features: Float[Array, "b t taps hidden"],
    anchors: Int[Array, "b a"],
    carried: Carried | None = None,
) -> Float[Array, "b a s hidden"]:
    """`draft_rows` for blocks behind many anchors of whole texts at once (the sparse block mask); differentiable.

    carried are those of all b * a blocks, row by row.
    """
    b, a, s, hidden = inputs.shape
    t = features.shape[1]
    k_rows, v_rows = context_rows(config, network, features, jnp.broadcast_to(jnp.arange(t), (b, t)), t + s)
    positions = (anchors[:, :, None] + jnp.arange(s)).reshape(b * a, s)
    split = lambda y: y.reshape(b, a, *y.shape[1:])  # noqa: E731
    rows, extra, seen = _carried(config, network, inputs.reshape(b * a, s, hidden), positions, t + s, carried)
    seen = None if seen is None else split(seen)

    def mix(index: int, leaves: Layer, x: Array) -> Array:
        q = split(_queries(config, leaves, x, positions, t + s))
        k, v = (split(y) for y in _joined(extra, index, _keys_values(config, leaves, x, positions, t + s)))
        own = (k_rows[index], v_rows[index], anchors, k, v)
        out = attention.attend_text(q, *own, config.causal[index], _window(config, index), seen)
        return out.reshape(b * a, *out.shape[2:])

    return _layers(config, network, rows, mix).reshape(inputs.shape)


def slot_inputs(config: BlockConfig, ends: Ends, anchor: Int[Array, "*b"]) -> Float[Array, "*b s hidden"]:
    """The embeddings of a block's slots: the anchor, then masks."""
    masks = jnp.full((*anchor.shape, config.block_size - 1), config.mask_token, anchor.dtype)
    return ends.embed(jnp.concatenate([anchor[..., None], masks], axis=-1)) * config.embedding_scale


def base_logits(
    config: BlockConfig, params: BlockParams, normed: Float[Array, "*b hidden"]
) -> Float[Array, "*b draft_vocab"]:
    """Logits of normed rows over the tokens that can be drafted."""
    z = params.ends.logits(normed) if params.lm_head is None else apply(params.lm_head, normed).astype(jnp.float32)
    z = z * config.output_multiplier
    return z if config.softcap is None else config.softcap * jnp.tanh(z / config.softcap)


def full_logits(
    config: BlockConfig, params: BlockParams, logits: Float[Array, "*b draft_vocab"]
) -> Float[Array, "*b vocab"]:
    """Logits over the target's vocabulary: -inf for tokens that can't be drafted."""
    if params.kept is None:
        return logits
    return jnp.full((*logits.shape[:-1], config.vocab_size), -jnp.inf).at[..., params.kept].set(logits)


def init_network(config: BlockConfig, key: Array, dtype: Any = jnp.float32, scale: float = 0.02) -> Network:
    """Random parameters: maps normal with standard deviation `scale`, norms one, convolutions the identity."""
    c, count = config, iter(range(1 << 20))

    def dense(into: int, out: int) -> Dense:
        return Dense((scale * jax.random.normal(jax.random.fold_in(key, next(count)), (into, out))).astype(dtype))

    def convolution() -> Conv | None:
        if c.conv_kernel_size is None or c.conv_group_size is None:
            return None
        base = jnp.zeros((2, c.conv_kernel_size, c.hidden_size), dtype).at[:, 0].set(1)
        out = 2 * c.conv_kernel_size * c.hidden_size // c.conv_group_size
        return Conv(base, Dense(jnp.zeros((c.hidden_size, out), dtype)))

    def layer() -> Layer:
        h, q, kv = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        return Layer(
            attention_norm=jnp.ones(h, dtype),
            q=dense(h, q),
            k=dense(h, kv),
            v=dense(h, kv),
            o=dense(q, h),
            q_norm=jnp.ones(c.head_dim, dtype),
            k_norm=jnp.ones(c.head_dim, dtype),
            mlp_norm=jnp.ones(h, dtype),
            gate=dense(h, c.intermediate_size),
            up=dense(h, c.intermediate_size),
            down=dense(c.intermediate_size, h),
            attention_conv=convolution(),
            mlp_conv=convolution(),
        )

    h, m = c.hidden_size, len(c.taps)
    retraces = c.rejected == "retrace"
    return Network(
        fc=dense(h if c.per_layer_features else m * h, h),
        feature_norm=jnp.ones(h, dtype),
        layers=tuple(layer() for _ in range(c.num_layers)),
        norm=jnp.ones(h, dtype),
        mix=jnp.zeros((c.num_layers, m), jnp.float32) if c.per_layer_features else None,
        marker=jnp.zeros(h, dtype) if c.rejected == "carryover" else None,
        retrace=carry.init_retrace(h, jax.random.fold_in(key, next(count)), dtype, scale) if retraces else None,
    )


def fused_features(
    config: BlockConfig, network: Network, features: Float[Array, "b n taps hidden"]
) -> Float[Array, "b n hidden"]:
    """The context of the layers: features joined, projected, then normed; with per-layer ones, the mixes' mean."""
    if network.mix is not None:
        shares = jax.nn.softmax(network.mix, axis=-1).mean(0)
        joined = jnp.einsum("t,bnth->bnh", shares, features)
    else:
        joined = features.reshape(*features.shape[:2], -1)
    x = apply(network.fc, joined.astype(network.norm.dtype))
    return rms_norm(x, network.feature_norm, config.rms_norm_eps)


def _carried(
    config: BlockConfig, network: Network, inputs: Array, positions: Array, room: int, kept: Carried | None
) -> tuple[Array, Any, Array | None]:
    """A block's inputs with what is carried over, and for Carryover its keys and values, and which are there."""
    if kept is None:
        return inputs, None, None
    if network.retrace is not None:
        seen = fused_features(config, network, kept.features)
        return carry.retraced(network.retrace, inputs, seen, kept), None, None
    return inputs, context_rows(config, network, kept.features, positions, room, network.marker), kept.valid


def _joined(extra: Any, index: int, own: tuple[Array, Array]) -> tuple[Array, ...]:
    """A layer's keys and values [b, m, kv, head_dim], those that are carried over in front."""
    if extra is None:
        return own
    return tuple(jnp.concatenate([kept[index], new], axis=1) for kept, new in zip(extra, own, strict=True))


def _contexts(config: BlockConfig, network: Network, features: Array) -> list[tuple[Layer, Array]]:
    """Each layer with its context. DFlare's, after its abstract: a softmax mix of the tapped layers per draft layer."""
    if network.mix is None:
        fused = fused_features(config, network, features)
        return [(leaves, fused) for leaves in network.layers]
    shares = jax.nn.softmax(network.mix, axis=-1)
    mixed = jnp.einsum("lt,bnth->lbnh", shares, features).astype(network.norm.dtype)
    normed = rms_norm(apply(network.fc, mixed), network.feature_norm, config.rms_norm_eps)
    return list(zip(network.layers, normed, strict=True))


def _layers(config: BlockConfig, network: Network, x: Array, mix: Any) -> Array:
    """Pre-norm layers; mix(index, leaves, normed rows) is the attention before its output map."""
    eps = config.rms_norm_eps
    for index, leaves in enumerate(network.layers):
        h, kernel = _convolved(leaves.attention_conv, rms_norm(x, leaves.attention_norm, eps))
        out = mix(index, leaves, h)
        out = apply(leaves.o, out.reshape(*x.shape[:2], -1))
        x = x + (out if leaves.attention_conv is None else conv.after(leaves.attention_conv, out, kernel))
        h, kernel = _convolved(leaves.mlp_conv, rms_norm(x, leaves.mlp_norm, eps))
        out = apply(leaves.down, jax.nn.silu(apply(leaves.gate, h)) * apply(leaves.up, h))
        x = x + (out if leaves.mlp_conv is None else conv.after(leaves.mlp_conv, out, kernel))
    return x


def _convolved(leaves: Conv | None, x: Array) -> tuple[Array, Any]:
    return (x, None) if leaves is None else conv.before(leaves, x)


def _window(config: BlockConfig, index: int) -> int | None:
    return config.sliding_window if config.layer_types[index] == SLIDING else None


def _queries(config: BlockConfig, leaves: Layer, x: Array, positions: Array, slots: int) -> Array:
    return _turned(config, apply(leaves.q, x), leaves.q_norm, positions, slots)


def _keys_values(config: BlockConfig, leaves: Layer, x: Array, positions: Array, slots: int) -> tuple[Array, Array]:
    k = _turned(config, apply(leaves.k, x), leaves.k_norm, positions, slots)
    return k, apply(leaves.v, x).reshape(*x.shape[:-1], -1, config.head_dim)


def _turned(config: BlockConfig, y: Array, norm: Array, positions: Array, slots: int) -> Array:
    inv_freq, factor = inverse_frequencies(config.rope, config.head_dim, config.max_position_embeddings, slots)
    heads = y.reshape(*y.shape[:-1], -1, config.head_dim)
    return rotate(rms_norm(heads, norm, config.rms_norm_eps), positions, inv_freq, factor)
