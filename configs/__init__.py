"""Published systems, a short file each: which pieces, which settings, the paper. Imported as `spec_jax.configs`.

Every file defines `engine(target, max_len)`, or `engine(target, max_len, draft_model)` where a small model drafts.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil

from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def names() -> list[str]:
    """The names that `build` takes."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def build(name: str, target: Target, max_len: int, draft_model: Target | None = None) -> Engine:
    """The engine of a published system for a target.

    Raises:
        ValueError: for a name that is none, or a draft model that the system lacks or does not use.
    """
    if name not in names():
        raise ValueError(f"config: got {name!r}, takes one of {', '.join(names())}")
    make = importlib.import_module(f"{__name__}.{name}").engine
    drafts = "draft_model" in inspect.signature(make).parameters
    if drafts != (draft_model is not None):
        raise ValueError(f"draft_model: {name} {'needs one' if drafts else 'uses none, got one'}")
    return make(target, max_len, draft_model) if drafts else make(target, max_len)
