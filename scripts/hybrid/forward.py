"""Qwen3-Next over whole sequences, made for training: a pure function of a parameter tree."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .experts import experts
from .mixers import KeysValues, attention, gated_delta, rms_norm
from .shape import Shape

Params = dict[str, Any]
BLOCK, CHUNK = 128, 32


def hidden(params: Params, tokens: Array, shape: Shape) -> tuple[Array, Array]:
    """Tokens [B, T] to hidden states after the last norm [B, T, d], and the mean balance loss of the experts.

    T is a multiple of CHUNK. Logits are hidden @ params["embed"].T.
    """
    x, balance = params["embed"][tokens], []
    for layer, kind in zip(params["layers"], shape.layer_types, strict=True):
        x, used, _ = _layer(layer, x, shape, kind)
        balance.append(used)
    return rms_norm(x, params["norm"], shape.rms_norm_eps), jnp.mean(jnp.stack(balance))


def predict_further(
    params: Params, states: Array, tokens: Array, shape: Shape, steps: int
) -> tuple[list[Array], Array]:
    """The MTP head, applied `steps` times: hidden states, of which those of step s at t predict token t + s + 1.

    states: [B, T, d] of `hidden`; tokens: [B, T + steps], the same text with `steps` more. Step s takes the embedding
    of token t + s and the hidden state of the step before (the target's for s = 1), and sees the keys of step 1 up to t
    and its own, as in drafting with true tokens (arXiv 2509.18362 trains one head recursively so). Also returns the
    balance loss.
    """
    head, eps, t = params["mtp"], shape.rms_norm_eps, states.shape[1]
    found, balance, past = [], [], None
    for s in range(1, steps + 1):
        embedded = rms_norm(params["embed"][tokens[:, s : s + t]], head["norm_embedding"], eps)
        x = jnp.concatenate([embedded, rms_norm(states, head["norm_hidden"], eps)], -1) @ head["fc"]
        x, used, keys = _layer(head["layer"], x, shape, "full_attention", s - 1, past)
        past = past or keys
        states = rms_norm(x, head["norm"], eps)
        found.append(states)
        balance.append(used)
    return found, jnp.mean(jnp.stack(balance))


def _layer(
    params: Params, x: Array, shape: Shape, kind: str, offset: int = 0, past: KeysValues | None = None
) -> tuple[Array, Array, KeysValues | None]:
    normed, keys = rms_norm(x, params["input_norm"], shape.rms_norm_eps), None
    if kind == "linear_attention":
        x = x + gated_delta(params["mixer"], normed, shape, CHUNK)
    else:
        mixed, keys = attention(params["mixer"], normed, shape, offset, past)
        x = x + mixed
    normed = rms_norm(x, params["post_norm"], shape.rms_norm_eps).reshape(-1, x.shape[-1])
    out, balance = experts(params["experts"], normed, shape.num_experts_per_tok, BLOCK)
    return x + out.reshape(x.shape), balance, keys


def init(key: Array, shape: Shape) -> Params:
    """Fresh parameters, matrices in [in, out] orientation; decays remember from about ten to a thousand tokens."""
    keys = iter(jax.random.split(key, 32 * (shape.num_hidden_layers + 2)))
    d, deep = shape.hidden_size, (2 * shape.num_hidden_layers) ** -0.5

    def normal(*sizes: int, scale: float = 1.0) -> Array:
        return jax.random.normal(next(keys), sizes) * scale * sizes[-2] ** -0.5

    def mixer(kind: str) -> dict[str, Array]:
        if kind == "full_attention":
            inner, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
            maps = {"q": normal(d, 2 * inner), "k": normal(d, kv), "v": normal(d, kv)}
            norms = {name: jnp.zeros(shape.head_dim) for name in ("q_norm", "k_norm")}
            return {**maps, **norms, "o": normal(inner, d, scale=deep)}
        keys_width = shape.linear_num_key_heads * shape.linear_key_head_dim
        heads = shape.linear_num_value_heads
        values_width = heads * shape.linear_value_head_dim
        low, high = math.log(1e-3), math.log(1e-1)
        step = jnp.exp(jax.random.uniform(next(keys), (heads,), minval=low, maxval=high))
        return {
            "qkvz": normal(d, 2 * keys_width + 2 * values_width),
            "ba": normal(d, 2 * heads),
            "conv": normal(shape.linear_conv_kernel_dim, 2 * keys_width + values_width),
            "A_log": jnp.log(jax.random.uniform(next(keys), (heads,), minval=1.0, maxval=16.0)),
            "dt_bias": step + jnp.log(-jnp.expm1(-step)),
            "norm": jnp.ones(shape.linear_value_head_dim),
            "out": normal(values_width, d, scale=deep),
        }

    def layer(kind: str) -> Params:
        count, inner, shared = shape.num_experts, shape.moe_intermediate_size, shape.shared_expert_intermediate_size
        sparse = {
            "router": normal(d, count),
            "gate_up": normal(count, d, 2 * inner),
            "down": normal(count, inner, d, scale=deep),
            "shared_gate": normal(d, 1),
            "shared_gate_up": normal(d, 2 * shared),
            "shared_down": normal(shared, d, scale=deep),
        }
        return {"input_norm": jnp.zeros(d), "mixer": mixer(kind), "post_norm": jnp.zeros(d), "experts": sparse}

    head = {name: jnp.zeros(d) for name in ("norm_embedding", "norm_hidden", "norm")}
    return {
        "embed": d**-0.5 * jax.random.normal(next(keys), (shape.vocab_size, d)),
        "layers": [layer(kind) for kind in shape.layer_types],
        "norm": jnp.zeros(d),
        "mtp": {**head, "fc": normal(2 * d, d), "layer": layer("full_attention")},
    }
