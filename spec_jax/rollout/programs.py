"""The compiled parts of a rollout engine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int, UInt32

from spec_jax.control.budget import Always
from spec_jax.drafters.none import NoDrafter
from spec_jax.engine import devices, loop, rows
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.state import EngineState
from spec_jax.models import placement
from spec_jax.rollout import compact, memory
from spec_jax.rollout.gated import Gated, Listening
from spec_jax.rollout.memory import Memory

T = TypeVar("T")


class Programs:
    """Prefill at one size; begin, put, tell, decode, plain and settle at each batch size; shrink from one to another.

    fresh and faded make what rows share; clear forgets prompts. `plain` are rounds of plain decoding on the same state:
    without a draft, room for one, or a choice of width. `tell` gives the drafter what is remembered of every row's
    prompt: work that rounds without drafts don't need. They tell it of their tokens alone, and only if it reads the
    target's features.
    """

    def __init__(self, engine: Engine) -> None:
        """Compile nothing yet."""
        self._engine, self._marks = engine, None
        self._jitted: list[Any] = []
        mesh = devices.mesh_of(engine)
        several = mesh is not None and mesh.is_multi_process

        def program(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
            jitted = jax.jit(functools.partial(f, engine), **options)
            self._jitted.append(jitted)
            return (lambda *args, **named: jitted(*_on_host(args), **named)) if several else jitted

        self.fresh = program(compact.fresh)
        self.faded = program(compact.faded)
        self.clear = program(lambda _, *args: memory.clear(*args))
        self.prefill = program(rows.init)
        self.put = program(_put, donate_argnums=0)
        self.tell = program(_tell, donate_argnums=0)
        self.begin = program(compact.begin, static_argnums=1)
        self.decode = program(loop.decode, donate_argnums=1)
        self.plain = program(_plain, donate_argnums=1)
        self.settle = program(_settle, donate_argnums=(0, 1))
        self.shrink = program(compact.shrink, static_argnums=2)

    def kept(self, params: EngineParams, state: EngineState) -> list[Array]:
        """`compact.kept`, whose marks are found once."""
        if self._marks is None:
            self._marks = compact.shared_leaves(self._engine, params)
        return compact.picked(self._marks, state)

    @property
    def count(self) -> int:
        """Number of compiled programs so far."""
        return sum(f._cache_size() for f in self._jitted)


def without_drafts(engine: Engine) -> Engine:
    """The engine of `Programs.plain`."""
    old: Any = engine.drafter
    drafter = Listening(old.drafter, old.chunk, reads=True) if reads(engine) else NoDrafter()
    return dataclasses.replace(engine, drafter=drafter, controller=Always(), widths=())


def reads(engine: Engine) -> bool:
    """Whether plain rounds tell the drafter of their tokens, with the target's features."""
    return isinstance(engine.drafter, Gated) and engine.drafter.reads


def bound(tree: T, like: Any) -> T:
    """The arrays on the one device that `like`'s are bound to, or whole on all devices of their mesh; else as they are.

    A program compiles anew for an array that is bound to its devices where the last one was not.
    """
    leaf = next((x for x in jax.tree.leaves(like) if isinstance(x, jax.Array)), None)
    if leaf is None or not leaf.committed:
        return tree
    there = leaf.sharding.device_set
    if len(there) == 1:
        return jax.device_put(tree, SingleDeviceSharding(*there))
    if not isinstance(leaf.sharding, NamedSharding):
        return tree
    whole = NamedSharding(leaf.sharding.mesh, P())
    return jax.tree.map(lambda x: x if x.sharding.device_set == there else placement.put(x, whole), tree)


def _on_host(tree: Any) -> Any:
    """Arrays of this process alone as host values, of which every process has the same; those of all as they are."""
    own = lambda x: isinstance(x, jax.Array) and x.is_fully_addressable  # noqa: E731
    return jax.tree.map(lambda x: np.asarray(x) if own(x) else x, tree)


def _plain(
    engine: Engine,
    params: EngineParams,
    state: EngineState,
    max_rounds: Int[Array, ""] | int,
    until_running: Int[Array, ""] | int,
) -> EngineState:
    """`loop.decode` by plain decoding; the drafter hears nothing of it (`Gated` catches up) but what it must read."""
    bare, counters, batch = without_drafts(engine), state.rows.counters, state.rows.length.shape[0]
    depths = ("depth_reached", "depth_accepted")
    count = lambda r, **own: dataclasses.replace(r, counters=dataclasses.replace(r.counters, **own))  # noqa: E731
    inner = EngineState(
        rows=count(state.rows, **dict.fromkeys(depths, jnp.zeros((batch, 1), jnp.int32))),
        target=state.target,
        drafter=state.drafter if reads(engine) else bare.drafter.init(None, batch, bare.max_len),
        controller=bare.controller.init(batch),
    )
    after = loop.decode(bare, params, inner, max_rounds, until_running=until_running)
    given = count(after.rows, **{name: getattr(counters, name) for name in depths})
    drafter = after.drafter if reads(engine) else state.drafter
    return dataclasses.replace(state, rows=given, target=after.target, drafter=drafter)


def _put(
    engine: Engine, state: EngineState, slots: Int[Array, "r"], fresh: EngineState, keys: UInt32[Array, "r 2"]
) -> EngineState:
    """Prefilled prompts in slots, each under a key of its own; a slot out of range is left out."""
    own = dataclasses.replace(fresh, rows=dataclasses.replace(fresh.rows, key=keys))
    return rows.insert(engine, state, slots, own)


def _settle(
    engine: Engine,
    state: EngineState,
    store: Memory | None,
    at: Int[Array, "b"],
    done: Bool[Array, "b"],
    version: Int[Array, ""],
) -> tuple[EngineState, Memory | None]:
    """Finished rows released, their texts remembered."""
    r, size = state.rows, done.shape[0]
    if store is not None:
        where = jnp.where(done, at, -1)
        store = memory.remember(store, where, r.tokens, r.prompt_length, r.length, version)
        if (mesh := devices.mesh_of(engine)) is not None:
            store = lax.with_sharding_constraint(store, NamedSharding(mesh, P()))
    return rows.release(engine, state, jnp.where(done, jnp.arange(size), size)), store


def _tell(engine: Engine, state: EngineState, store: Memory, at: Int[Array, "b"]) -> EngineState:
    """The rows told what is remembered of their prompts; nothing of one whose `at` is out of range."""
    drafter: Any = engine.drafter
    return dataclasses.replace(state, drafter=drafter.recall(state.drafter, memory.recall(store, at)))
