"""What a run measured: a line of JSON a step, TensorBoard events, and a plot."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from tensorboardX import SummaryWriter

Row = dict[str, float]


class Log:
    """Appends rows to `log.jsonl` and to TensorBoard events in the same directory."""

    def __init__(self, directory: str | Path, step: int = 0) -> None:
        """Open a directory for a run that goes on at `step`; rows from there on, of a run cut short, are dropped."""
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / "log.jsonl"
        kept = [row for row in read(self.directory) if row["step"] <= step]
        part = path.with_suffix(".part")
        part.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        os.replace(part, path)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._events = SummaryWriter(str(self.directory), purge_step=step + 1)

    def write(self, step: int, values: Mapping[str, Any]) -> Row:
        """Add a row: the step's number, counted from 1, and its figures; returns it as written."""
        row = {"step": step} | {name: float(value) for name, value in values.items()}
        self._file.write(json.dumps(row) + "\n")
        for name, value in row.items():
            if name != "step":
                self._events.add_scalar(name, value, step)
        return row

    def close(self) -> None:
        """Write out what is still in memory."""
        self._file.close()
        self._events.close()

    def __enter__(self) -> Log:
        """For `with`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


def read(directory: str | Path) -> list[Row]:
    """The rows of a run, none if there is no log; a last line that was cut off is left out."""
    path = Path(directory) / "log.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def smooth(values: Iterable[float], span: int) -> list[float]:
    """The running mean of up to `span` values on either side."""
    data = np.fromiter(values, float)
    total = np.concatenate([[0.0], np.cumsum(data)])
    low, high = np.maximum(np.arange(len(data)) - span, 0), np.minimum(np.arange(len(data)) + span + 1, len(data))
    return list((total[high] - total[low]) / (high - low))


def plot(
    rows: Iterable[Row],
    path: str | Path,
    names: Mapping[str, str],
    title: str,
    across: str = "step",
    ylabel: str = "loss (nats per token)",
) -> None:
    """Draw figures of a run as a picture: `names` maps those to draw to their labels, `across` names the x axis.

    Figures that stand in every row are smoothed, the others (held-out measures) drawn as points.
    """
    from matplotlib.figure import Figure

    rows = list(rows)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    low, high = [], []
    for name, label in names.items():
        found = [(row[across], row[name]) for row in rows if name in row and across in row]
        if not found:
            continue
        x, y = (list(part) for part in zip(*found, strict=True))
        if len(found) > len(rows) / 2:
            y = smooth(y, max(1, len(y) // 200))
            axes.plot(x, y, label=label, linewidth=1.2)
        else:
            axes.plot(x, y, "o-", label=label, markersize=3, linewidth=0.8)
        low.append(min(y))
        high.append(max(y[len(y) // 20 :]))
    if low and min(low) * 0.95 < max(high) * 1.05:
        axes.set_ylim(min(low) * 0.95, max(high) * 1.05)
    if low:
        axes.legend()
    axes.set(title=title, xlabel=across, ylabel=ylabel)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
