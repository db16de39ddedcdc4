"""Qwen models over whole texts, differentiable: what training needs."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.models import delta_mixer, experts, gated_attention, layers
from spec_jax.models.delta_mixer import Delta
from spec_jax.models.experts import Experts
from spec_jax.models.norms import rms_norm
from spec_jax.models.qwen import Layer, QwenParams, head
from spec_jax.models.qwen_config import WINDOW, QwenConfig
from spec_jax.models.qwen_shapes import required_tensors
from spec_jax.models.qwen_tensors import from_tensors


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
    form: experts.Form = "dense",
) -> TextOutput:
    """All of [B, T] texts at once, without a state. `remat` keeps no layer's insides for the backward pass.

    Rows that end early are padded behind their text, which no earlier position sees; their losses are the caller's to
    mask. form: see `experts.mix`.
    """
    x = params.embedding[:, tokens.reshape(-1)].T.reshape(*tokens.shape, -1)

    def step(x: Array, index: int, leaves: Layer) -> tuple[Array, Array | None]:
        run = lambda x, leaves: text_layer(config, x, index, leaves, form)  # noqa: E731
        return (jax.checkpoint(run) if remat else run)(x, leaves)

    hidden, outs = layers.run(step, x, params.layers)
    losses = [loss.reshape(-1) for loss in jax.tree.leaves(outs)]
    balance = jnp.concatenate(losses).mean() if losses else jnp.zeros(())
    return TextOutput(head(params, final_norm(config, params, hidden[-1])), hidden[-1], balance)


def text_layer(
    config: QwenConfig, x: Float[Array, "b t hidden"], index: int, leaves: Layer, form: experts.Form = "dense"
) -> tuple[Float[Array, "b t hidden"], Array | None]:
    """One layer over whole texts; returns outputs and the load-balancing loss (None without experts)."""
    h = rms_norm(x, leaves.mixer_norm, config.rms_norm_eps)
    if isinstance(leaves.mixer, Delta):
        empty = dataclasses.replace(delta_mixer.empty(config, x.shape[0], 0, x.dtype), pending=None)
        x = x + delta_mixer.read_text(config, leaves.mixer, h, empty, differentiable=True)[0]
    else:
        window = config.sliding_window if config.layer_types[index] == WINDOW else None
        x = x + gated_attention.attend_text(config, leaves.mixer, h, window)
    flat = rms_norm(x, leaves.mlp_norm, config.rms_norm_eps).reshape(-1, x.shape[-1])
    if not isinstance(leaves.mlp, Experts):
        return x + leaves.mlp(flat).reshape(x.shape), None
    routing = experts.route(leaves.mlp, flat, config.num_experts_per_tok or 1, config.norm_topk_prob)
    return x + experts.mix(leaves.mlp, flat, routing, form).reshape(x.shape), experts.balance(routing)


def final_norm(config: QwenConfig, params: QwenParams, hidden: Float[Array, "b n hidden"]) -> Array:
    """The final norm: what the head reads, and what the MTP head takes for the first of its tokens."""
    return rms_norm(hidden, params.norm, config.rms_norm_eps)


def init_params(config: QwenConfig, key: Array, dtype: Any = jnp.float32, scale: float = 0.02) -> QwenParams:
    """Random parameters: maps normal with standard deviation `scale`, norms one, gates over their whole range.

    The gates are those of transformers: A uniform in (0.01, 16), dt_bias one. config.mtp adds an MTP head.
    """
    shapes = required_tensors(config)

    def draw(index: int, name: str, shape: tuple[int, ...]) -> Array:
        own, kind = jax.random.fold_in(key, index), name.rsplit(".", 2)[-2:]
        if kind[-1] == "A_log":
            return jnp.log(jax.random.uniform(own, shape, minval=0.01, maxval=16.0))
        if kind[-1] == "dt_bias":
            return jnp.ones(shape)
        if "norm" in kind[0]:
            return jnp.zeros(shape) if config.offset_norms and "linear_attn" not in name else jnp.ones(shape)
        if kind[0] == "conv1d":
            bound = shape[-1] ** -0.5
            return jax.random.uniform(own, shape, minval=-bound, maxval=bound)
        return jnp.zeros(shape) if kind[-1] == "bias" else scale * jax.random.normal(own, shape)

    tensors = {name: draw(i, name, shape) for i, (name, shape) in enumerate(shapes.items())}
    return from_tensors(config, tensors, dtype)
