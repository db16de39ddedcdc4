"""The run-time checker behind --jaxtyping-packages: beartype, made to fit array dataclasses.

Arguments and results of every function in spec_jax are checked against their annotations, shapes included. Constructors
are checked too, but JAX also calls them to rebuild a tree around leaves that are no arrays (axes, shardings, shapes,
booleans), so a pytree dataclass is checked only where our own code makes one that holds arrays.
"""

import functools
import sys

import jax
import numpy as np
from beartype import BeartypeConf, beartype

_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function):
    checked = _beartype(function)
    if function.__name__ != "__init__":
        return checked

    @functools.wraps(function)
    def constructor(self, *args, **kwargs):
        if not hasattr(type(self), "_flax_dataclass") or _holds_arrays(args, kwargs) and not _called_by_jax():
            return checked(self, *args, **kwargs)
        return None

    return constructor


def _holds_arrays(*arguments):
    return any(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(arguments))


def _called_by_jax():
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__") == __name__ or frame.f_globals["__name__"].startswith("jaxtyping."):
        frame = frame.f_back
    return frame.f_globals["__name__"].split(".")[0] in ("jax", "jaxlib")
