"""The training loop: steps until the schedule ends, with logs, held-out measures and checkpoints."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from spec_jax.train.checkpoints import Checkpoints
from spec_jax.train.logs import Log, Row
from spec_jax.train.schedule import Schedule
from spec_jax.train.step import Metrics, TrainState


class Batches(Protocol):
    """Batches by their number, as `data.windows` gives them."""

    def __getitem__(self, step: int) -> Any:
        """The batch of the step with this number, counted from 0."""
        ...


def fit(
    state: TrainState,
    step: Callable[[TrainState, Any, float], tuple[TrainState, Metrics]],
    batches: Batches,
    schedule: Schedule,
    log: Log,
    checkpoints: Checkpoints,
    *,
    log_every: int = 1,
    save_every: float = 300.0,
    measure_every: int = 0,
    measure: Callable[[Any], Mapping[str, Any]] | None = None,
    report: Callable[[Row], None] | None = None,
) -> TrainState:
    """Train from where `state` stands until the schedule ends or the process is told to stop (SIGINT, SIGTERM).

    The batch and the rate depend on the number of the step alone (with BySteps), so a run that was stopped and goes on
    has the curve of one that was not. The last state is saved in every case, and measured if the schedule ended.

    Args:
        state: the parameters are used up.
        step: see make_step.
        log_every: a row of the log every so many steps.
        save_every: seconds between checkpoints.
        measure_every: `measure(params)` every so many steps, into the same row; 0: at the end only.
        report: called with every row.
    """
    number = int(state.step)
    saved, begin, begun_at = time.monotonic(), time.monotonic(), number
    measured = False
    with _stop_signals() as stopped:
        while not stopped.is_set() and (rate := schedule(number)) is not None:
            state, metrics = step(state, batches[number], rate)
            number += 1
            measured = measure is not None and measure_every > 0 and number % measure_every == 0
            if number % log_every == 0 or measured:
                row = {name: float(value) for name, value in metrics.items()} | {"rate": rate}
                row["steps_per_second"] = (number - begun_at) / (time.monotonic() - begin)
                if measured and measure is not None:
                    row |= measure(state.params)
                    begin, begun_at = time.monotonic(), number
                row = log.write(number, row)
                if report is not None:
                    report(row)
            if time.monotonic() - saved > save_every:
                checkpoints.save(state)
                saved = time.monotonic()
        checkpoints.save(state)
        if measure is not None and not measured and not stopped.is_set():
            row = log.write(number, measure(state.params))
            if report is not None:
                report(row)
    return state


@contextlib.contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set while the block runs; outside the main thread nothing sets it."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.signal(kind, lambda *_: stopped.set()) for kind in kinds}
    try:
        yield stopped
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
