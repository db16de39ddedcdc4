"""What the small hybrid is trained for, and how it is measured on text it has not seen."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from spec_jax.models import mtp, qwen_text
from spec_jax.models.qwen import QwenParams
from spec_jax.models.qwen_config import QwenConfig

MTP_STEPS = 2


def lengths(context: int) -> tuple[int, int]:
    """Tokens of a window that the model reads `context` of, and how many of them the next one repeats in `measure`."""
    return context + 1 + MTP_STEPS, 1 + 2 * MTP_STEPS


@dataclasses.dataclass(frozen=True)
class Weights:
    """mtp, balance: their weights beside the next-token loss; fade: of each further MTP step against the one before.

    mtp_rows: of the batch's rows, how many the MTP head is trained on (it costs a layer and a head a step).
    """

    mtp: float = 0.3
    balance: float = 0.01
    fade: float = 0.6
    mtp_rows: int = 1


def make_loss(config: QwenConfig, weights: Weights) -> Callable[[QwenParams, Array], tuple[Array, dict[str, Array]]]:
    """The loss of a batch [B, T + 1 + MTP_STEPS], as `spec_jax.train.step` takes it.

    Next-token cross-entropy, the MTP head's for each of its steps (weights fade^s, as in arXiv 2509.18362), and the
    experts' balance; nats per token.
    """

    def loss(params: QwenParams, tokens: Array) -> tuple[Array, dict[str, Array]]:
        t = tokens.shape[1] - 1 - MTP_STEPS
        out = qwen_text.forward_text(config, params, tokens[:, :t])
        total = jnp.mean(_nats(out.logits, tokens[:, 1 : t + 1]))
        metrics = {"loss": total, "balance": out.balance}
        total += weights.balance * (out.balance - 1)
        rows = min(weights.mtp_rows, tokens.shape[0])
        if rows and weights.mtp:
            some = tokens[:rows]
            found, balance = _further(config, params, out.hidden[:rows], some)
            share = [weights.fade**s for s in range(MTP_STEPS)]
            for s, logits in enumerate(found):
                metrics[f"mtp_{s + 1}"] = nats = jnp.mean(_nats(logits, some[:, s + 2 : s + 2 + t]))
                total += weights.mtp * share[s] / sum(share) * nats
            total += weights.mtp * weights.balance * (balance - 1)
        return total, metrics

    return loss


def measure(config: QwenConfig, params: QwenParams, batches: np.ndarray, bytes_per_token: float) -> dict[str, float]:
    """Held-out figures over windows [steps, B, T + 1 + MTP_STEPS] (`data.whole`), each read from its start.

    held_out_loss in nats per token, held_out_bits per byte of text, mtp_1_nats and mtp_2_nats of the MTP head, and
    mtp_1_agrees, mtp_2_agrees: how often its likeliest token is the model's own at that place, given the true text
    up to it, which is what a drafter's guess has to be.
    """
    sums = [np.asarray(_sums(config, params, batch), np.float64) for batch in batches]
    t = batches.shape[2] - 1 - MTP_STEPS
    places = batches.shape[0] * batches.shape[1] * (t - MTP_STEPS)
    loss, *rest = np.sum(sums, 0) / places
    names = [f"mtp_{s + 1}_{what}" for s in range(MTP_STEPS) for what in ("nats", "agrees")]
    bits = loss / math.log(2) / bytes_per_token
    return {"held_out_loss": float(loss), "held_out_bits": float(bits)} | dict(
        zip(names, map(float, rest), strict=True)
    )


@functools.partial(jax.jit, static_argnums=0)
def _sums(config: QwenConfig, params: QwenParams, tokens: Array) -> Array:
    t = tokens.shape[1] - 1 - MTP_STEPS
    out = qwen_text.forward_text(config, params, tokens[:, :t])
    places = t - MTP_STEPS  # those whose later tokens the model has been asked for too
    choice = jnp.argmax(out.logits, -1)
    figures = [jnp.sum(_nats(out.logits[:, :places], tokens[:, 1 : places + 1]))]
    for s, logits in enumerate(_further(config, params, out.hidden, tokens)[0], 1):
        logits = logits[:, :places]
        figures.append(jnp.sum(_nats(logits, tokens[:, s + 1 : s + 1 + places])))
        figures.append(jnp.sum(jnp.argmax(logits, -1) == choice[:, s : s + places]))
    return jnp.stack(figures)


def _further(config: QwenConfig, params: QwenParams, hidden: Array, tokens: Array) -> tuple[list[Array], Array]:
    """Logits of the MTP head's steps behind hidden states [B, T, d] of the first T tokens, and its balance loss."""
    context, t = qwen_text.final_norm(config, params, hidden), hidden.shape[1]
    outputs, balance = mtp.forward_steps(config, params, context, tokens[:, 1 : t + MTP_STEPS], MTP_STEPS)
    return [output.logits for output in outputs], balance


def _nats(logits: Array, targets: Array) -> Array:
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
