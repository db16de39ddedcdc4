"""Staged speculative decoding: the drafter is itself sped up by a cheaper one, and drafts a tree; after its abstract.

The cheaper one is Token Recycling (arXiv 2408.08696), where the paper has an n-gram model; the target is given the
small model's chain, and the table's tree behind it.
"""

from spec_jax.drafters.cascade import Cascade
from spec_jax.drafters.recycling import Recycling
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int, draft_model: Target) -> Engine:
    """Five tokens of the small model, coupled, and a tree of up to seven behind them."""
    table = Recycling(target.vocab_size, nodes=8, max_depth=3)
    return Engine(target, max_len, drafter=Cascade(draft_model, table, k=5, tail=True))
