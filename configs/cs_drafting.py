"""Cascade Speculative Drafting: statistics draft for the drafter, and go on behind it; after its abstract.

The vertical cascade: prompt lookup (arXiv 2304.04487) proposes what the small model chooses. The horizontal one: behind
the small model's tokens, which matter most, stand looked-up ones.
"""

from spec_jax.drafters.cascade import Cascade
from spec_jax.drafters.ngram import NGram
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int, draft_model: Target) -> Engine:
    """Four tokens of the small model, coupled, and up to three behind them."""
    return Engine(target, max_len, drafter=Cascade(draft_model, NGram(k=3), k=4, tail=True))
