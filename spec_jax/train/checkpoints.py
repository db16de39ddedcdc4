"""Checkpoints of a training run, with what must be the same for it to go on."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from spec_jax.train.step import TrainState


class Checkpoints:
    """The newest `keep` states in a directory; each appears whole or not at all.

    settings: what another run must share to go on from here, as JSON: sizes, data, seed, a vocabulary map.
    """

    def __init__(self, directory: str | Path, settings: Mapping[str, Any], keep: int = 2) -> None:
        """Open a directory, making it if it is not there."""
        self.directory = Path(directory).absolute()
        self._settings = json.loads(json.dumps(dict(settings)))
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def save(self, state: TrainState) -> None:
        """Write a state under its step; a step that is there already is left as it is."""
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        parts = ocp.args.Composite(state=ocp.args.StandardSave(state), settings=ocp.args.JsonSave(self._settings))
        self._manager.save(step, args=parts)

    def restore(self, like: TrainState) -> TrainState | None:
        """The newest state, None if there is none.

        Raises ValueError, naming the setting, if the run there was another one.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        found = self.settings() or {}
        for name in sorted(found.keys() | self._settings.keys()):
            if found.get(name) != self._settings.get(name):
                got, takes = (reprlib.repr(x.get(name)) for x in (self._settings, found))
                raise ValueError(f"{name}: got {got}, takes {takes} to go on with the run in {self.directory}")
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(shapes)))["state"]

    def settings(self) -> dict[str, Any] | None:
        """Those of the run that the directory holds, None if there is none."""
        step = self._manager.latest_step()
        if step is None:
            return None
        return self._manager.restore(step, args=ocp.args.Composite(settings=ocp.args.JsonRestore()))["settings"]

    def close(self) -> None:
        """Let the directory go."""
        self._manager.close()

    def __enter__(self) -> Checkpoints:
        """For `with`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()
