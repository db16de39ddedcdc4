"""How far a run is: a bar on a terminal, a line now and then in a file."""

from __future__ import annotations

from collections.abc import Collection
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from spec_jax.train.logs import Row


class Progress:
    """Shows rows of a log as they come."""

    def __init__(
        self,
        total: int | None,
        names: Collection[str] = ("loss", "gradient", "rate"),
        tokens: int | None = None,
        line_every: int = 50,
        always: Collection[str] = (),
    ) -> None:
        """Set up.

        Args:
            total: steps to the end, None if it is not known.
            names: the figures that are shown, those of them that a row has.
            tokens: tokens of a step, to show how many a second; None shows none.
            line_every: without a terminal, a line every so many rows.
            always: figures whose rows are shown in any case.
        """
        self._names, self._tokens, self._every, self._always = tuple(names), tokens, line_every, set(always)
        self._console = Console(highlight=False)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._bar = Bar(*columns, TextColumn("{task.description}"), console=self._console)
        self._task = self._bar.add_task("compiling", total=total)
        self._rows = 0

    def report(self, row: Row) -> None:
        """Show a row of the log."""
        self._rows += 1
        if self._console.is_terminal:
            self._bar.update(self._task, completed=int(row["step"]), description=self.text(row))
        elif (self._rows - 1) % self._every == 0 or self._always & row.keys():
            self._console.print(f"step {int(row['step'])}: {self.text(row)}", soft_wrap=True)

    def text(self, row: Row) -> str:
        """A row in words."""
        parts = [f"{name} {row[name]:.4g}" for name in self._names if name in row]
        if self._tokens is not None and "steps_per_second" in row:
            parts.append(f"{row['steps_per_second'] * self._tokens:.0f} tokens/s")
        return ", ".join(parts)

    def __enter__(self) -> Progress:
        """Show the bar, where there is a terminal."""
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the bar as it stands."""
        if self._console.is_terminal:
            self._bar.stop()
