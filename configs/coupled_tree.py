"""Coupled draft trees: a small model grows the tree that shares the target's noise (coupling: arXiv 2408.07978).

Nodes are ranked by the chance that they are the target's choice given the noise it will choose with, by weights fitted
while decoding. Sampled text is plain decoding's, accepted nearly as often as greedy text.
"""

from spec_jax.drafters.model_tree import ModelTree
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.topology.growth import Growth


def engine(target: Target, max_len: int, draft_model: Target) -> Engine:
    """Six levels of four expanded nodes, of which the best 15 are verified by position-keyed match."""
    growth = Growth(nodes=16, depth=6, width=4, children=4, ranking="coupled")
    return Engine(target, max_len, drafter=ModelTree(draft_model, growth))
