"""The compiled programs of a decoder, which decoders of an equal engine and batch size share; prefill, of any size."""

from __future__ import annotations

import functools
from typing import Any

import jax

from spec_jax.engine import loop, rows
from spec_jax.engine.engine import Engine


class Programs:
    """Prefill of one row; empty, place, close, release and decode of `batch` slots. Compiled when first called."""

    def __init__(self, engine: Engine, batch: int, places: Any) -> None:
        """places are the shardings of the state, None without a mesh."""
        jit = functools.partial(jax.jit, out_shardings=places)
        self.prefill = _prefill(engine)
        self.empty = jit(functools.partial(rows.empty, engine, batch=batch))
        self.place = jit(functools.partial(rows.place, engine), donate_argnums=0)
        self.close = jit(functools.partial(rows.close), donate_argnums=0)  # partial: JAX shares a bare function's cache
        self.release = jit(functools.partial(rows.release, engine), donate_argnums=0)
        self.decode = jit(functools.partial(loop.decode, engine, until_any_finishes=True), donate_argnums=1)


def programs(engine: Engine, batch: int, places: Any = None) -> Programs:
    """The programs of these sizes: the same ones for an equal engine, so that another decoder of it compiles nothing.

    Those of the last 16 engines and batch sizes are kept.
    """
    leaves, structure = jax.tree.flatten(places)
    return _programs(engine, batch, structure, tuple(leaves))


def forget() -> None:
    """Keep no program; decoders that have theirs go on with them."""
    _prefill.cache_clear()
    _programs.cache_clear()


@functools.lru_cache(maxsize=16)
def _prefill(engine: Engine) -> Any:
    return jax.jit(functools.partial(rows.init, engine))


@functools.lru_cache(maxsize=16)
def _programs(engine: Engine, batch: int, structure: Any, leaves: tuple[Any, ...]) -> Programs:
    return Programs(engine, batch, structure.unflatten(leaves))
