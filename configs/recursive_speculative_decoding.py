"""Recursive speculative decoding, constant branching (RSD-C, arXiv 2402.14160).

A small model draws siblings without replacement; each is tried against the residual of those before it. The text has
the target's law; it is not plain decoding's text for the same key.
"""

from spec_jax.drafters.model_tree import ModelTree
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.topology.branching import Branching
from spec_jax.verify.rejection import rejection


def engine(target: Target, max_len: int, draft_model: Target) -> Engine:
    """Two children at the first two depths, then chains: 18 drafted nodes, five deep."""
    drafter = ModelTree(draft_model, Branching((2, 2, 1, 1, 1)))
    return Engine(target, max_len, drafter=drafter, rule=rejection)
