"""OPT-Tree (arXiv 2406.17276): the tree with the most expected tokens, deepened only while it gains enough."""

from spec_jax.drafters.model_tree import ModelTree
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.topology.growth import Growth


def engine(target: Target, max_len: int, draft_model: Target) -> Engine:
    """15 nodes, a frontier as wide as the tree, up to eight levels; a level must bring a fifth of a token."""
    growth = Growth(nodes=16, depth=8, width=15, children=8, delta=0.2)
    return Engine(target, max_len, drafter=ModelTree(draft_model, growth))
