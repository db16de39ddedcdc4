"""Speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

A small model samples a chain; each token is kept with probability min(1, p / q), a refused one is drawn again from the
residual. The text has the target's law; it is not plain decoding's text for the same key.
"""

from spec_jax.drafters.small_model import SmallModel
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.verify.rejection import rejection


def engine(target: Target, max_len: int, draft_model: Target) -> Engine:
    """Chains of four sampled tokens."""
    return Engine(target, max_len, drafter=SmallModel(draft_model, k=4, mode="sampled"), rule=rejection)
