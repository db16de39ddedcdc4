"""SpecInfer (arXiv 2305.09781): a tree of a small model's own draws, verified one sibling after another.

The text has the target's law; it is not plain decoding's text for the same key.
"""

from spec_jax.drafters.model_tree import ModelTree
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.topology.branching import Branching
from spec_jax.verify.rejection import rejection


def engine(target: Target, max_len: int, draft_model: Target) -> Engine:
    """Its expansion widths 1, 1, 3, 1, 1: 11 drafted nodes, five deep."""
    drafter = ModelTree(draft_model, Branching((1, 1, 3, 1, 1), replacement=True))
    return Engine(target, max_len, drafter=drafter, rule=rejection)
