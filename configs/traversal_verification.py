"""Traversal Verification (arXiv 2505.12398): a drawn tree verified from its leaves to the root.

The text has the target's law; it is not plain decoding's text for the same key.
"""

from spec_jax.drafters.model_tree import ModelTree
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.topology.branching import Branching
from spec_jax.verify.traversal import traversal


def engine(target: Target, max_len: int, draft_model: Target) -> Engine:
    """Two children at the first two depths, without repeats, then chains: 14 drafted nodes."""
    drafter = ModelTree(draft_model, Branching((2, 2, 1, 1)))
    return Engine(target, max_len, drafter=drafter, rule=traversal)
