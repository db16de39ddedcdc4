"""The drafters that a training begins with, or compares with: earlier weights of the same kind and sizes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from spec_jax.drafters.load import load_drafter
from spec_jax.models.load import LoadedTarget
from spec_jax.train.recipe import Training
from spec_jax.train.task import Trainable

REFERENCE = "reference"
"""The name under which a `Batch`'s shared arrays hold the reference's parameters."""


@dataclasses.dataclass(frozen=True)
class Earlier:
    """What is trained of the drafters that `begin` and `reference` name, and their reduced vocabulary; None: none."""

    begin: Any = None
    reference: Any = None
    kept: np.ndarray | None = None

    @classmethod
    def read(cls, training: Training, forward: Trainable, model: LoadedTarget, folder: Path) -> Earlier:
        """Load them; `folder` is what their paths are relative to.

        Raises FileNotFoundError for what is no folder, and ValueError for a drafter of another kind, of other sizes, or
        of another vocabulary than the other one's, naming the entry.
        """
        found: dict[str, Any] = {}
        kept = None
        for name in ("begin", "reference"):
            if getattr(training, name) is None:
                continue
            path = folder / getattr(training, name)
            if not path.is_dir():
                raise FileNotFoundError(f"{name}: got {path}, takes the folder of a trained drafter")
            loaded = load_drafter(path, model)
            _same(name, path, forward, {"network": loaded.target.config, **loaded.parts})
            own = getattr(loaded.params, "kept", None)
            if own is not None:
                if kept is not None and not np.array_equal(kept, own):
                    raise ValueError(f"{name}: {path} drafts other tokens than begin, takes the same vocabulary")
                kept = np.asarray(own)
            found[name] = forward.trained(loaded.params)
        return cls(**found, kept=kept)


def _same(name: str, path: Path, forward: Trainable, parts: dict[str, Any]) -> None:
    wanted = {"network": forward.config} | ({"head": getattr(forward, "head", None)} if "head" in parts else {})
    for part, want in wanted.items():
        got = parts[part]
        if got == want:
            continue
        fields = vars(want) if type(got) is type(want) else {}
        apart = [f"{field} {vars(got)[field]!r}" for field in fields if vars(got)[field] != fields[field]]
        has = ", ".join(apart) or repr(got)
        raise ValueError(f"{name}: {path} has a {part} with {has}, takes the recipe's: {want}")
