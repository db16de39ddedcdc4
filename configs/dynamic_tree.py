"""EAGLE-2's dynamic draft tree (arXiv 2406.16858), grown with a small model in place of its head.

Each level expands the likeliest nodes of the level above; in the end the likeliest nodes of all levels are kept.
"""

from spec_jax.drafters.model_tree import ModelTree
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.topology.growth import Growth


def engine(target: Target, max_len: int, draft_model: Target) -> Engine:
    """Six levels, eight nodes expanded a level with eight children each, 31 kept."""
    growth = Growth(nodes=32, depth=6, width=8, children=8)
    return Engine(target, max_len, drafter=ModelTree(draft_model, growth))
