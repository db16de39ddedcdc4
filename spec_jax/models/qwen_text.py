"""Qwen models over whole texts, differentiable: what training needs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.models import delta_mixer, experts, layers
from spec_jax.models.delta_mixer import Delta
from spec_jax.models.norms import rms_norm
from spec_jax.models.qwen import Layer, QwenParams, added, embed, feed_forward, head
from spec_jax.models.qwen_config import WINDOW, QwenConfig
from spec_jax.models.qwen_shapes import required_tensors
from spec_jax.models.qwen_tensors import from_tensors
from spec_jax.models.text_attention import attend_text


@flax.struct.dataclass
class TextOutput:
    """Next-token logits, hidden states before the final norm, and the mean load-balancing loss of the sparse layers."""

    logits: Float[Array, "b t vocab"]
    hidden: Float[Array, "b t hidden"]
    balance: Float[Array, ""]


def forward_text(
    config: QwenConfig,
    params: QwenParams,
    tokens: Int[Array, "b t"],
    remat: bool = False,
    form: experts.Form | None = None,
) -> TextOutput:
    """All of [B, T] texts at once, without a state. `remat` keeps no layer's insides for the backward pass.

    Rows that end early are padded behind their text, which no earlier position sees; their losses are the caller's to
    mask. form: see `experts.mix`; None: `experts.text_form()`.
    """
    x = embed(config, params, tokens)

    def step(x: Array, index: int, leaves: Layer) -> tuple[Array, Array | None]:
        run = lambda x, leaves: text_layer(config, x, index, leaves, form)  # noqa: E731
        return (jax.checkpoint(run) if remat else run)(x, leaves)

    hidden, outs = layers.run(step, x, params.layers)
    losses = [loss.reshape(-1) for loss in jax.tree.leaves(outs)]
    balance = jnp.concatenate(losses).mean() if losses else jnp.zeros(())
    return TextOutput(head(params, final_norm(config, params, hidden[-1])), hidden[-1], balance)


def text_layer(
    config: QwenConfig, x: Float[Array, "b t hidden"], index: int, leaves: Layer, form: experts.Form | None = None
) -> tuple[Float[Array, "b t hidden"], Array | None]:
    """One layer over whole texts; returns outputs and the load-balancing loss (None without experts)."""
    h = rms_norm(x, leaves.mixer_norm, config.rms_norm_eps)
    if isinstance(leaves.mixer, Delta):
        empty = dataclasses.replace(delta_mixer.empty(config, x.shape[0], 0, x.dtype), pending=None)
        y = delta_mixer.read_text(config, leaves.mixer, h, empty, differentiable=True)[0]
    else:
        window = config.sliding_window if config.layer_types[index] == WINDOW else None
        y = attend_text(config, leaves.mixer, h, window)[0]
    return second_half(config, leaves, added(config, x, y, leaves.mixer_after), form)


def second_half(
    config: QwenConfig, leaves: Layer, x: Float[Array, "b t hidden"], form: experts.Form | None = None
) -> tuple[Float[Array, "b t hidden"], Array | None]:
    """A layer's MLP or experts over whole texts, and the load-balancing loss (None without experts)."""
    x, routing = feed_forward(config, leaves, x, form or experts.text_form())
    return x, None if routing is None else experts.balance(routing)


def final_norm(config: QwenConfig, params: QwenParams, hidden: Float[Array, "b n hidden"]) -> Array:
    """The final norm: what the head reads, and what the MTP head takes for the first of its tokens."""
    return rms_norm(hidden, params.norm, config.rms_norm_eps)


def init_params(
    config: QwenConfig,
    key: Array,
    dtype: Any = jnp.float32,
    scale: float | None = 0.02,
    memory: tuple[float, float] | None = None,
) -> QwenParams:
    """Random parameters; config.mtp adds an MTP head.

    scale: the maps' standard deviation. None: one over the root of their inputs, and of those that write to the
    hidden state over that of twice the layers too, which keeps its size alike at any depth.

    memory: the shortest and the longest time constant of the gates at rest, in tokens, before a factor A in (1, 16)
    that shortens it: dt_bias is log-uniform between, as Mamba's. None: the gates of transformers, A uniform in
    (0.01, 16) and dt_bias one, most of which forget at once.
    """
    shapes = required_tensors(config)
    writes = ("o_proj", "out_proj", "down_proj")

    def draw(index: int, name: str, shape: tuple[int, ...]) -> Array:
        own, (at, kind) = jax.random.fold_in(key, index), name.rsplit(".", 2)[-2:]
        if kind == "A_log":
            return jnp.log(jax.random.uniform(own, shape, minval=1.0 if memory else 0.01, maxval=16.0))
        if kind == "dt_bias":
            return jnp.ones(shape) if memory is None else _rest(own, shape, memory)
        if "norm" in at:
            return jnp.zeros(shape) if config.offset_norms and "linear_attn" not in name else jnp.ones(shape)
        if kind == "bias":
            return jnp.zeros(shape)
        if at == "conv1d" and scale is not None:
            bound = shape[-1] ** -0.5
            return jax.random.uniform(own, shape, minval=-bound, maxval=bound)
        size = shape[-1] ** -0.5 if scale is None else scale
        if scale is None and (at in writes or kind in writes):
            size *= (2 * config.num_layers) ** -0.5
        return size * jax.random.normal(own, shape)

    tensors = {name: draw(i, name, shape) for i, (name, shape) in enumerate(shapes.items())}
    return from_tensors(config, tensors, dtype)


def _rest(key: Array, shape: tuple[int, ...], memory: tuple[float, float]) -> Array:
    """dt_bias whose softplus is one over a time constant that is log-uniform in `memory`."""
    low, high = (-math.log(x) for x in memory[::-1])
    step = jnp.exp(jax.random.uniform(key, shape, minval=low, maxval=high))
    return step + jnp.log(-jnp.expm1(-step))
