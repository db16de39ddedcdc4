"""Drafters that keep up with their policy: trained on its own rollouts, between two calls. Needs the extra `train`.

TLT (arXiv 2511.16665) trains its drafter beside the rollouts, ReSpec (arXiv 2510.26475) weighs what it distils by their
rewards, OSD (arXiv 2310.07177) keeps what was served in a buffer. None of it can change a text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from spec_jax.checks import check_number
from spec_jax.rollout.programs import bound
from spec_jax.rollout.records import Rollout
from spec_jax.train import online, step
from spec_jax.train.loader import Texts
from spec_jax.train.online import Buffer
from spec_jax.train.step import Metrics, TrainState
from spec_jax.train.task import Task


class Refresh:
    """A drafter's training whose `derive` is that of a `RolloutEngine`: it learns what it was told before it drafts.

    What is told are tokens alone. Features and laws are those of the policy that comes, by its own forward on batches
    of one size. From the second time on nothing is compiled; arrays go where the policy's are, which is one device.

    Attributes:
        metrics: those of the last training step; None before the first one.
    """

    def __init__(
        self,
        task: Task,
        trained: Any,
        *,
        length: int,
        capacity: int = 256,
        rows: int = 8,
        steps: int = 1,
        rate: float = 1e-4,
        optimizer: optax.GradientTransformation | None = None,
        shared: Any = None,
        key: Array | int = 0,
    ) -> None:
        """Set up; nothing is compiled or run.

        Args:
            task: the loss; its forward a `Trainable`.
            trained: the parameters to begin with, `forward.init`'s or `forward.trained` of a drafter's; copied.
            length: tokens of a text in training; of a longer one the last, whose features are then not quite those that
                decoding had.
            capacity: texts that are kept; the oldest make room.
            rows: texts of a step, drawn from those.
            steps: steps for each time that something was told.
            rate: the learning rate.
            optimizer: without its rate; None: `step.adamw` without decay.
            shared: see `Batch`.
            key: seed or typed key, of what is drawn.

        Raises:
            ValueError: for sizes below 1, or a rate that is not above 0.
        """
        for name, given in {"length": length, "capacity": capacity, "rows": rows, "steps": steps}.items():
            check_number(name, given, 1, integer=True)
        check_number("rate", rate, 0.0, open_low=True)
        self._forward: Any = task.forward
        self._length, self._steps, self._rate, self._shared = length, steps, rate, shared
        self._key = jax.random.key(key) if isinstance(key, int) else key
        optimizer = step.adamw(trained, weight_decay=0.0) if optimizer is None else optimizer
        self._state = step.init(jax.tree.map(jnp.copy, trained), optimizer)
        nothing = texts_of([], np.zeros((0, 0), np.int32), np.zeros((0, 0), bool), np.zeros(0), length, 1)
        self._buffer, self._told = online.empty(nothing, capacity), False
        self._push: Any = jax.jit(online.push)
        update = functools.partial(_update, step.make_step(task.loss, optimizer), rows)
        self._update: Any = jax.jit(update, donate_argnums=0)
        self.metrics: Metrics | None = None

    @property
    def trained(self) -> Any:
        """What is trained, so far: a copy."""
        return jax.tree.map(jnp.copy, self._state.params)

    @property
    def programs(self) -> int:
        """Number of compiled programs so far: 2 at most."""
        return sum(f._cache_size() for f in (self._push, self._update))

    def tell(
        self, prompts: Sequence[Sequence[int]], rollout: Rollout, weights: Sequence[float] | np.ndarray | None = None
    ) -> None:
        """Remember a call's texts for the next training.

        Args:
            prompts: as the call had them.
            rollout: what it gave; the loss counts what was emitted, by rows that were cut off too.
            weights: how much each row counts, such as its reward; None: all alike.

        Raises:
            ValueError: for rows that aren't as many of each prompt, and for other weights than one of at least 0 a row.
        """
        n, size = len(rollout.tokens), self._buffer.capacity
        if len(prompts) == 0 or n % len(prompts):
            raise ValueError(f"prompts: got {len(prompts)} for {n} rows, takes those of the call")
        given = np.ones(n, np.float32) if weights is None else np.asarray(weights, np.float32)
        if given.shape != (n,) or not (np.isfinite(given) & (given >= 0)).all():
            raise ValueError(f"weights: got {given.tolist()}, takes a finite one of at least 0 for each of {n} rows")
        whole = [prompts[i // (n // len(prompts))] for i in range(n)]
        for at in range(0, n, size):
            some = slice(at, at + size)
            own = (whole[some], rollout.tokens[some], rollout.mask[some], given[some])
            self._buffer = self._push(self._buffer, texts_of(*own, self._length, size), jnp.arange(size) < n - at)
        self._told = True

    def derive(self, policy: Any) -> Any:
        """The drafter's parameters for a policy, behind `steps` of training under it if something new was told."""
        if self._told:
            given, self._told = bound((self._buffer, self._key), policy), False
            for _ in range(self._steps):
                state = bound(self._state, policy)
                self._state, self.metrics = self._update(state, *given, self._rate, policy, self._shared)
        return self._forward.as_drafter(bound(self.trained, policy), policy, self._shared)

    def state(self) -> dict[str, Any]:
        """Copies of what training goes on from, as a tree of arrays."""
        return jax.tree.map(jnp.copy, {"state": self._state, "buffer": self._buffer, "told": np.array(self._told)})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that a `Refresh` of the same settings saved."""
        self._state, self._buffer = jax.tree.map(jnp.array, (state["state"], state["buffer"]))
        self._told = bool(state["told"])


def texts_of(
    prompts: Sequence[Sequence[int]],
    tokens: Int[np.ndarray, "n t"],
    mask: Bool[np.ndarray, "n t"],
    weights: Float[np.ndarray, "n"],
    length: int,
    rows: int,
) -> Texts:
    """Rows behind their prompts as `rows` texts of `length` tokens: the last ones of longer texts; empty ones fill up.

    A text's loss counts what was emitted.
    """
    text, counts = np.zeros((rows, length), np.int32), np.zeros((rows, length), bool)
    lengths, weight = np.zeros(rows, np.int32), np.zeros(rows, np.float32)
    weight[: len(prompts)] = weights
    for i, prompt in enumerate(prompts):
        whole = np.array([*prompt, *tokens[i, mask[i]]], np.int32)
        lengths[i] = size = min(length, len(whole))
        text[i, :size] = whole[-size:]
        counts[i, :size] = (np.arange(len(whole)) >= len(prompt))[-size:]
    return Texts(*map(jnp.asarray, (text, counts, lengths)), weight=jnp.asarray(weight))


def _update(
    run: Callable[..., tuple[TrainState, Metrics]],
    rows: int,
    state: TrainState,
    buffer: Buffer,
    key: Array,
    rate: Any,
    policy: Any,
    shared: Any,
) -> tuple[TrainState, Metrics]:
    """`online.update`, whose rows the number of the step gives."""
    return online.update(run, state, buffer, jax.random.fold_in(key, state.step), rate, rows, policy, shared)
