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

from .forward import Params, hidden, predict_further
from .shape import Shape

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


def make_loss(shape: Shape, weights: Weights) -> Callable[[Params, Array], tuple[Array, dict[str, Array]]]:
    """The loss of a batch [B, T + 1 + MTP_STEPS], T a multiple of the chunk, as `spec_jax.train.step` takes it.

    Next-token cross-entropy, the MTP head's for each of its steps (weights fade^s, as in arXiv 2509.18362), and the
    experts' balance; nats per token.
    """

    def loss(params: Params, tokens: Array) -> tuple[Array, dict[str, Array]]:
        t = tokens.shape[1] - 1 - MTP_STEPS
        states, balance = hidden(params, tokens[:, :t], shape)
        total = jnp.mean(_nats(params, states, tokens[:, 1 : t + 1]))
        metrics = {"loss": total, "balance": balance}
        total += weights.balance * (balance - 1)
        rows = min(weights.mtp_rows, tokens.shape[0])
        if rows and weights.mtp:
            some = tokens[:rows]
            found, balance = predict_further(params, states[:rows], some[:, : t + MTP_STEPS], shape, MTP_STEPS)
            share = [weights.fade**s for s in range(MTP_STEPS)]
            for s, further in enumerate(found):
                metrics[f"mtp_{s + 1}"] = nats = jnp.mean(_nats(params, further, some[:, s + 2 : s + 2 + t]))
                total += weights.mtp * share[s] / sum(share) * nats
            total += weights.mtp * weights.balance * (balance - 1)
        return total, metrics

    return loss


def measure(params: Params, batches: np.ndarray, bytes_per_token: float, shape: Shape) -> dict[str, float]:
    """Held-out figures over windows [steps, B, T + 1 + MTP_STEPS] (`data.whole`), each read from its start.

    held_out_loss in nats per token, held_out_bits per byte of text, mtp_1_nats and mtp_2_nats of the MTP head, and
    mtp_1_agrees, mtp_2_agrees: how often its likeliest token is the model's own at that place, given the true text
    up to it, which is what a drafter's guess has to be.
    """
    sums = [np.asarray(_sums(params, batch, shape), np.float64) for batch in batches]
    t = batches.shape[2] - 1 - MTP_STEPS
    places = batches.shape[0] * batches.shape[1] * (t - MTP_STEPS)
    loss, *rest = np.sum(sums, 0) / places
    names = [f"mtp_{s + 1}_{what}" for s in range(MTP_STEPS) for what in ("nats", "agrees")]
    bits = loss / math.log(2) / bytes_per_token
    return {"held_out_loss": float(loss), "held_out_bits": float(bits)} | dict(
        zip(names, map(float, rest), strict=True)
    )


@functools.partial(jax.jit, static_argnums=2)
def _sums(params: Params, tokens: Array, shape: Shape) -> Array:
    t = tokens.shape[1] - 1 - MTP_STEPS
    states, _ = hidden(params, tokens[:, :t], shape)
    places = t - MTP_STEPS  # those whose later tokens the model has been asked for too
    loss = jnp.sum(_nats(params, states[:, :places], tokens[:, 1 : places + 1]))
    choice = jnp.argmax(states @ params["embed"].T, -1)
    found, _ = predict_further(params, states, tokens[:, : t + MTP_STEPS], shape, MTP_STEPS)
    figures = [loss]
    for s, further in enumerate(found, 1):
        further = further[:, :places]
        figures.append(jnp.sum(_nats(params, further, tokens[:, s + 1 : s + 1 + places])))
        figures.append(jnp.sum(jnp.argmax(further @ params["embed"].T, -1) == choice[:, s : s + places]))
    return jnp.stack(figures)


def _nats(params: Params, states: Array, targets: Array) -> Array:
    logits = states @ params["embed"].T
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
