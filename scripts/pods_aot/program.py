"""A round (draft, score, accept, commit) on a mesh of chips that are not there, from shapes alone, and compiled."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import aot
from pallas_kernels.platform import compiling_for
from spec_jax.drafters import mtp
from spec_jax.drafters.ngram import NGram
from spec_jax.drafters.none import NoDrafter
from spec_jax.engine import devices, rows
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.round import decode_round
from spec_jax.models.load import abstract_params
from spec_jax.models.partition import param_specs
from spec_jax.models.placement import make_mesh, shardings
from spec_jax.models.qwen import Qwen
from spec_jax.sampling.constraint import free
from spec_jax.topology.growth import Growth

from .shapes import Case

_CHUNK = 64


def compiled(case: Case, nodes: int) -> Any:
    """The compiled round whose drafts have `nodes` nodes, in bfloat16; the state is donated.

    Raises what libtpu refuses, such as a program that does not fit a chip's memory.
    """
    mesh = make_mesh({"data": case.data, "expert": case.expert, "tensor": case.tensor}, aot.devices(case.topology))
    engine, params, state = abstract(case, nodes, mesh)
    places = jax.tree.map(lambda x: x.sharding, state)
    with compiling_for("tpu"):
        program = jax.jit(functools.partial(decode_round, engine), donate_argnums=1, out_shardings=places)
        return aot.finish(program.lower(params, state))


def abstract(case: Case, nodes: int, mesh: Mesh) -> tuple[Engine, EngineParams, Any]:
    """The engine, and its parameters and state as shapes on the mesh; nothing is allocated."""
    target: Any = dataclasses.replace(Qwen(case.config), mesh=mesh)
    if case.drafter == "mtp":
        target = mtp.tapped(target)
    shapes = abstract_params(case.config, jnp.bfloat16, stacked=True)
    weights = _on(shardings(mesh, param_specs(target, shapes)), shapes)
    engine = Engine(target, case.context - max(nodes, _CHUNK), _drafter(case, target, nodes), prefill_chunk=_CHUNK)
    shared = jax.eval_shape(lambda: (free(target.vocab_size), jnp.ones(1)))
    everywhere = NamedSharding(mesh, P())
    constraint, cost = _on(jax.tree.map(lambda _: everywhere, shared), shared)
    params = EngineParams(weights, mtp.params(weights) if case.drafter == "mtp" else None, constraint, cost)
    state = jax.eval_shape(lambda p: rows.empty(engine, p, case.batch), params)
    return engine, params, _on(shardings(mesh, devices.state_specs(engine, state)), state)


def _drafter(case: Case, target: Qwen, nodes: int) -> Any:
    if nodes == 1:
        return NoDrafter()
    if case.drafter == "prompt_lookup":
        return NGram(k=nodes - 1)
    return mtp.drafter(target, tree(nodes))


def tree(nodes: int) -> Growth:
    """The tree that the MTP head grows: a chain of up to three tokens, or three levels."""
    if nodes <= 4:
        return mtp.chain(nodes - 1)
    return Growth(nodes=nodes, depth=3, width=min(8, nodes // 4), children=min(8, nodes // 2))


def _on(places: Any, shapes: Any) -> Any:
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, places)
