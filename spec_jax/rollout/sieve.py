"""A rollout in two pools: a partial rollout says which prompts are the tail, and those run apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from spec_jax.engine.state import Finish
from spec_jax.rollout import schedule
from spec_jax.rollout.engine import RolloutEngine
from spec_jax.rollout.records import Rollout
from spec_jax.sampling.settings import Sampling


def sieve(
    bulk: RolloutEngine,
    tail: RolloutEngine,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    key: Array | int,
    until_running: int,
    step: Callable[[Any], Any],
    speedup: float = 1.0,
    group: int = 1,
    sampling: Sampling | None = None,
) -> Rollout:
    """One rollout, its long groups apart: TailSieve on one replica a pool, in our reading of its abstract.

    The bulk's pool runs until no more than `until_running` rows are left. Groups that have one among them are begun
    anew, each in the pool that `schedule.split` and `schedule.tail` find for it by its mean length so far: one pool
    after the other here, where two replicas would run both at once. Every row keeps its key, so the text is that of
    one call of `generate`, and none is chosen by its length.

    Args:
        bulk: the pool of the many; of the same policy, pad id and log-probs as the other one.
        tail: the pool of the few, with a drafter, say.
        prompts: token ids.
        max_new_tokens: most tokens of a sample.
        key: the key of all rows.
        until_running: see `generate`.
        step: seconds of a decoding step by rows, as `schedule.split` takes it.
        speedup: tokens of a step in the tail's pool.
        group: samples per prompt.
        sampling: settings of all rows; None: temperature 1.

    Raises:
        ValueError: as `generate` and `schedule.split` do.
    """
    asked: dict[str, Any] = {"group": group, "sampling": sampling, "key": key}
    whole = bulk.generate(prompts, max_new_tokens, until_running=until_running, **asked)
    left = np.flatnonzero(schedule.unfinished(jnp.asarray(whole.finish == Finish.RUNNING), group))
    if len(left) == 0:
        return whole
    work = jnp.asarray(whole.length.reshape(-1, group)[left].mean(1), jnp.float32)
    long = np.asarray(schedule.tail(work, schedule.split(work, group, 2, step, speedup).groups))
    for pool, some in ((tail, left[long]), (bulk, left[~long])):
        if len(some):
            again = pool.generate([prompts[i] for i in some], max_new_tokens, numbers=some.tolist(), **asked)
            whole = _with(whole, again, (some[:, None] * group + np.arange(group)).reshape(-1))
    return whole


def _with(whole: Rollout, part: Rollout, rows: np.ndarray) -> Rollout:
    """The rollout with some rows, and further segments, from another one."""
    names = ("tokens", "mask", "log_probs", "finish", "rounds")
    merged = {name: getattr(whole, name).copy() for name in names}
    for name in names:
        merged[name][rows] = getattr(part, name)
    return dataclasses.replace(whole, **merged, segments=whole.segments + part.segments)
