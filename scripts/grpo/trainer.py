"""GRPO on rollouts: advantages within a group, a clipped ratio to the rollout's own log-probs, AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from spec_jax.models.llama import Llama
from spec_jax.models.qwen import Qwen
from spec_jax.train.step import Metrics, TrainState

from . import policy as policies


@flax.struct.dataclass
class Batch:
    """Texts [B, T] from position 0, which of their tokens were rolled out, their log-probs then, and advantages."""

    tokens: Int[Array, "b t"]
    mask: Bool[Array, "b t"]
    old: Float[Array, "b t"]
    advantage: Float[Array, "b"]


class RunState(TrainState):
    """What a run keeps: the policy and its optimizer, and what the rollout engine goes on from."""

    rollout: Any = None


def advantages(rewards: Float[np.ndarray, "n"], group: int) -> Float[np.ndarray, "n"]:
    """Rewards less their group's mean, over its standard deviation (GRPO, arXiv 2402.03300, section 4.1.2)."""
    of = rewards.reshape(-1, group)
    return ((of - of.mean(1, keepdims=True)) / (of.std(1, keepdims=True) + 1e-4)).reshape(-1)


def loss(target: Llama | Qwen, temperature: float, clip: float = 0.2) -> Callable[[Any, Batch], tuple[Array, Metrics]]:
    """The clipped surrogate, mean over rolled-out tokens; no penalty on the distance to a reference."""

    def of(params: Any, batch: Batch) -> tuple[Array, Metrics]:
        now = policies.log_probs(target, params, batch.tokens, temperature)
        ratio = jnp.exp(jnp.where(batch.mask, now - batch.old, 0.0))
        better = batch.advantage[:, None]
        gain = jnp.minimum(ratio * better, jnp.clip(ratio, 1 - clip, 1 + clip) * better)
        total = jnp.maximum(batch.mask.sum(), 1)
        off = jnp.abs(jnp.where(batch.mask, ratio - 1, 0.0)).max()
        value = -jnp.where(batch.mask, gain, 0.0).sum() / total
        return value, {"loss": value, "off_policy": off}

    return of


def imitate(target: Llama | Qwen) -> Callable[[Any, Batch], tuple[Array, Metrics]]:
    """Cross-entropy of the masked tokens: the warm-up of a policy that starts from nothing."""

    def of(params: Any, batch: Batch) -> tuple[Array, Metrics]:
        now = policies.log_probs(target, params, batch.tokens, 1.0)
        value = -jnp.where(batch.mask, now, 0.0).sum() / jnp.maximum(batch.mask.sum(), 1)
        return value, {"loss": value}

    return of


def batch_of(
    prompts: list[list[int]], tokens: np.ndarray, mask: np.ndarray, old: np.ndarray, advantage: np.ndarray, size: int
) -> Batch:
    """Prompts and responses (row i belongs to prompt i) as texts of `size` tokens."""
    n = len(tokens)
    text, where, logs = np.zeros((n, size), np.int32), np.zeros((n, size), bool), np.zeros((n, size), np.float32)
    for i, prompt in enumerate(prompts):
        start, count = len(prompt), int(mask[i].sum())
        text[i, :start] = prompt
        span = slice(start, start + count)
        text[i, span], where[i, span], logs[i, span] = tokens[i, :count], True, old[i, :count]
    return Batch(*map(jnp.asarray, (text, where, logs, advantage.astype(np.float32))))
