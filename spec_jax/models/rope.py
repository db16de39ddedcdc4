"""Rotary position embedding (arXiv 2104.09864) with the length extensions that checkpoints use."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from spec_jax.models.config import RopeConfig


def inverse_frequencies(
    rope: RopeConfig, head_dim: int, max_position: int, length: int | None = None
) -> tuple[Float32[np.ndarray, "half"], float]:
    """The angle per position of each of the head_dim / 2 rotated pairs, and the factor on cos and sin.

    Types dynamic and longrope depend on the length of the text. A rotated key is never rotated again, so here the
    length is that of the state, `length` slots, from the first token on; None means no more than the trained length.
    transformers takes the length of the text so far, hence changes the frequencies while a text grows and keeps keys
    that were rotated with the older ones. Both agree for a text that fills the state in one pass, and for every text in
    a state no longer than the trained length (dynamic: `max_position`; longrope: `original_max_position_embeddings`).
    With these types, rows can't move between states of different lengths.

    Sources: linear and dynamic, as in transformers; yarn, arXiv 2309.00071 section 3; longrope, arXiv 2402.13753;
    llama3, the rule of the Llama 3.1 release.
    """
    theta, factor = rope.theta, rope.factor or 1.0
    if rope.type == "dynamic":
        stretch = factor * max(length or 0, max_position) / max_position - (factor - 1)
        theta = theta * stretch ** (head_dim / (head_dim - 2))
    period = np.float32(theta) ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    frequency = np.float32(1) / period
    match rope.type:
        case "linear":
            return frequency / np.float32(factor), 1.0
        case "llama3":
            return _llama3(rope, frequency), 1.0
        case "yarn":
            return _yarn(rope, head_dim, period), _yarn_attention(rope)
        case "longrope":
            original = rope.original_max_position_embeddings or max_position
            scale = rope.long_factor if length is not None and length > original else rope.short_factor
            attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
            return np.float32(1) / (np.asarray(scale, np.float32) * period), rope.attention_factor or attention
    return frequency, 1.0


def rotate(
    x: Float[Array, "*b n heads d"],
    positions: Int[Array, "*b n"],
    inv_freq: Float[np.ndarray | Array, "half"],
    attention_factor: float = 1.0,
) -> Float[Array, "*b n heads d"]:
    """Rotate elements i and i + half of each head by positions * inv_freq, in float32; the result has x's type.

    Elements from 2 * half on stay as they are (partial rotation).
    """
    size = 2 * inv_freq.shape[0]
    if size < x.shape[-1]:
        turned = rotate(x[..., :size], positions, inv_freq, attention_factor)
        return jnp.concatenate([turned, x[..., size:]], axis=-1)
    angle = positions[..., None, None].astype(jnp.float32) * inv_freq
    cos, sin = jnp.cos(angle) * attention_factor, jnp.sin(angle) * attention_factor
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _llama3(rope: RopeConfig, frequency: np.ndarray) -> np.ndarray:
    assert rope.factor and rope.original_max_position_embeddings and rope.low_freq_factor and rope.high_freq_factor
    turns = rope.original_max_position_embeddings * frequency / np.float32(2 * math.pi)
    smooth = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return ((1 - smooth) * frequency / rope.factor + smooth * frequency).astype(np.float32)


def _yarn(rope: RopeConfig, head_dim: int, period: np.ndarray) -> np.ndarray:
    original = rope.original_max_position_embeddings
    assert rope.factor and original

    def pair(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast or 32), pair(rope.beta_slow or 1)
    if rope.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low if high != low else 0.001)
    interpolate = np.clip(ramp, 0, 1)
    return (interpolate / (rope.factor * period) + (1 - interpolate) / period).astype(np.float32)


def _yarn_attention(rope: RopeConfig) -> float:
    def scale(m: float) -> float:
        return 0.1 * m * math.log(rope.factor) + 1.0 if rope.factor and rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return float(rope.attention_factor)
    return scale(rope.mscale) / scale(rope.mscale_all_dim) if rope.mscale and rope.mscale_all_dim else scale(1.0)
