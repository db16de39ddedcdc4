"""Which platform's kernels are chosen where the caller names none."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax

_split_by_compiler: contextvars.ContextVar[bool] = contextvars.ContextVar("split_by_compiler", default=False)
_compiled_for: contextvars.ContextVar[str | None] = contextvars.ContextVar("compiled_for", default=None)


def platform() -> str:
    """The platform that is compiled for (see `compiling_for`), else jax's default backend."""
    return _compiled_for.get() or jax.default_backend()


@contextlib.contextmanager
def compiling_for(name: str) -> Iterator[None]:
    """Inside, choices are made as on the platform `name` ("cpu", "gpu", "tpu"): for programs of chips not at hand.

    It counts while a function is traced; what was traced before stays as it is.
    """
    token = _compiled_for.set(name)
    try:
        yield
    finally:
        _compiled_for.reset(token)


def kernels() -> str | None:
    """The platform whose kernels can be called here; None where the compiler splits arrays over devices."""
    return None if _split_by_compiler.get() else platform()


@contextlib.contextmanager
def split_by_compiler(split: bool) -> Iterator[None]:
    """Inside, no kernel is chosen, or with False one may be: XLA can't split a kernel, only a shard_map calls one.

    It counts while a function is traced.
    """
    token = _split_by_compiler.set(split)
    try:
        yield
    finally:
        _split_by_compiler.reset(token)
