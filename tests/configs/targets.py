"""A target that each config can be built for."""

import dataclasses
import importlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import configs
from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.ngram import NGram
from spec_jax.drafters.rest import build_store
from spec_jax.engine import rows
from spec_jax.engine.engine import EngineParams
from spec_jax.engine.round import context_of
from spec_jax.models.toy import AuditTarget, audit_table
from spec_jax.sampling.constraint import free
from tests.drafters.block.kit import llama
from tests.drafters.hybrid import agreeing

V = 8


def module(name):
    return importlib.import_module(f"spec_jax.configs.{name}")


DRAFT_MODEL = {name for name in configs.names() if "draft_model" in inspect.signature(module(name).engine).parameters}
NETWORK = {name for name in configs.names() if "network" in inspect.signature(module(name).engine).parameters}
BLOCK = {
    name for name in NETWORK if inspect.signature(module(name).engine).parameters["network"].annotation is BlockConfig
}
DRAFTER = {name for name in configs.names() if "drafter" in inspect.signature(module(name).engine).parameters}
VIEWS = {"clasp", "draft_and_verify", "efficient_rollout", "knn_ssd", "magicdec", "mask_probing", "subspec", "swift"}
OWN_HEAD = {name for name in configs.names() if hasattr(module(name), "drafter_params")} - VIEWS


def model_of(name):
    """(target, parameters): one with an MTP head, or with layers, for configs that need it; else the audit model."""
    if name in VIEWS:
        return llama()
    return agreeing(sparse=False, vocab_size=V) if name in OWN_HEAD else (AuditTarget(V), audit_table(V))


def build(name, max_len=80):
    """The config's engine for that target, with the target itself as draft model where there is one."""
    target = model_of(name)[0]
    parts = {"draft_model": target if name in DRAFT_MODEL else None, "drafter": NGram() if name in DRAFTER else None}
    return configs.build(name, target, max_len, **parts)


def own_params(name, params):
    """The drafter's parameters, of the target's."""
    if name == "rest":
        return build_store([np.random.default_rng(0).integers(0, V, 400).tolist()])
    return configs.drafter_params(name, params)


def names(all_of_them, alike):
    """Names as parameters. Those that are `alike`, other settings of what another one is made of, are slow tests."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in alike else name for name in sorted(all_of_them)]


def narrow(engine):
    """The engine with two of its lesser widths and the greatest at most: its program holds a whole round for each."""
    return dataclasses.replace(engine, widths=(*engine.widths[:-1][:2], engine.widths[-1]))


def weak(engine, params, own):
    """Places of an engine's state, empty or with a draft, that are weakly typed: a round may make them strong."""
    shared = EngineParams(params, own, free(engine.target.vocab_size), jnp.ones(len(engine.widths)))

    def view(p, state):
        return context_of(state.rows, p.constraint, state.target)

    def states(p):
        state = rows.empty(engine, p, 2)
        return state, engine.drafter.propose(p.drafter, state.drafter, view(p, state))[1]

    found = jax.tree.leaves_with_path(jax.eval_shape(states, shared))
    return [jax.tree_util.keystr(path) for path, leaf in found if leaf.weak_type]
