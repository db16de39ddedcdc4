"""Exact speculative decoding for JAX: draft a tree, score it in one pass, accept by an exact rule, move the state."""

from spec_jax.control.cost import CostModel
from spec_jax.drafters.none import NoDrafter
from spec_jax.engine.decoder import Decoder, Result, Update
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.loop import decode
from spec_jax.engine.requests import request, stack
from spec_jax.engine.round import decode_round
from spec_jax.engine.rows import close, empty, init, insert, place, release
from spec_jax.sampling.settings import Sampling
from spec_jax.tree import Draft, Law, Tree
from spec_jax.verify.match import match
from spec_jax.verify.rejection import point_mass, rejection

__all__ = [
    "CostModel",
    "Decoder",
    "Draft",
    "Engine",
    "EngineParams",
    "Law",
    "NoDrafter",
    "Result",
    "Sampling",
    "Tree",
    "Update",
    "close",
    "decode",
    "decode_round",
    "empty",
    "init",
    "insert",
    "match",
    "place",
    "point_mass",
    "rejection",
    "release",
    "request",
    "stack",
]
