"""The run-time checker behind --jaxtyping-packages: beartype, made to fit array dataclasses.

Arguments and results of every function in spec_jax are checked against their annotations, shapes included; for a
protocol that is the presence of its members. Constructors are checked too, but JAX also calls them to rebuild a tree
around leaves that are no arrays (axes, shardings, shapes, booleans), so a pytree dataclass is checked only where our
own code makes one that holds arrays.
"""

import functools
import sys
import typing

import jax
import numpy as np
from beartype import BeartypeConf, beartype

_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function):
    for hint in function.__annotations__.values():
        _make_checkable(hint)
    checked = _beartype(function)
    if function.__name__ != "__init__":
        return checked

    @functools.wraps(function)
    def constructor(self, *args, **kwargs):
        if not hasattr(type(self), "_flax_dataclass") or _holds_arrays(args, kwargs) and not _called_by_jax():
            return checked(self, *args, **kwargs)
        return None

    return constructor


def _make_checkable(hint):
    if getattr(hint, "_is_protocol", False) and isinstance(hint, type):
        typing.runtime_checkable(hint)
    for part in typing.get_args(hint):
        _make_checkable(part)


def _holds_arrays(*arguments):
    return any(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(arguments))


def _called_by_jax():
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__") == __name__ or _package(frame) == "jaxtyping":
        frame = frame.f_back
    return _package(frame) == "jax"


def _package(frame):
    return frame.f_globals.get("__name__", "").split(".")[0]
