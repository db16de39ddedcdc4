"""A trained confidence head's temperatures, fitted on held-out texts that the target wrote (DSpark's calibration)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from spec_jax.drafters.block.calibration import calibrate
from spec_jax.train.loader import Batch
from spec_jax.train.objective import Objective
from spec_jax.train.task import Task

_LAW = Objective((("forward_kl", 1.0),))


def calibrated(task: Task, params: Any, batches: Any, count: int, temperature: float = 0.0) -> Any:
    """A block drafter's trained parameters with its confidence head's temperatures set (see `calibrate`).

    A draft is a block behind an anchor of a text, with the text's tokens before each slot, as far from the text's end
    as the drafter drafts. At temperature 0 a token is accepted if it is the drafter's likeliest and the text's; above
    it, with the chance that strict rejection accepts one drawn at that temperature.

    Args:
        task: what was trained: the drafter's forward, and the target with the taps of a loss that reads its law.
        params: the trained parameters, whose `head` has a temperature.
        batches: held-out batches by number, as `Feed` gives them.
        count: of them.
        temperature: of the answers that the confidences are for.

    Raises:
        ValueError: for a drafter without a confidence head, or texts too short for one whole draft.
    """
    head = params.head
    if getattr(head, "temperature", None) is None:
        raise ValueError(f"params: got a head {type(head).__name__} without confidence, takes one that has it")
    labels = "again" if task.labels == "again" else "text"
    task = dataclasses.replace(task, labels=labels, objective=_LAW, reference=None)
    run = jax.jit(functools.partial(_drafts, task, temperature))
    found = [jax.device_get(run(params, batches[i])) for i in range(count)]
    logits, accepted = (np.concatenate([each[part][each[2]] for each in found]) for part in (0, 1))
    if not len(logits):
        raise ValueError(f"batches: got texts without a draft of {task.forward.slots} tokens, takes longer ones")
    temperatures = jnp.asarray(calibrate(logits, accepted), head.temperature.dtype)
    return dataclasses.replace(params, head=dataclasses.replace(head, temperature=temperatures))


def _drafts(
    task: Task, temperature: float, params: Any, batch: Batch
) -> tuple[Float[Array, "n k"], Bool[Array, "n k"], Bool[Array, "n"]]:
    """The uncalibrated logits of all drafts, what was accepted, and which drafts are whole."""
    slots, said, asked = task.run(params, batch)
    n, k = asked.anchors.size, task.forward.slots
    if temperature > 0:
        warm = dataclasses.replace(slots, logits=slots.logits / temperature, target=slots.law / temperature)
        chance = warm.overlap()
        accepted = jax.random.bernoulli(jax.random.fold_in(asked.key, 1), chance)
    else:
        accepted = slots.correct()
    whole = asked.real & (asked.anchors + k < batch.texts.length[:, None])
    rows = lambda x: x.reshape(-1, k)[:n]  # noqa: E731  blocks behind a rejection come after those of the text
    assert said.confidence is not None
    return rows(said.confidence) * params.head.temperature, rows(accepted), whole.reshape(-1)
