"""A small model that shares the target's noise (Daliri et al., arXiv 2408.07978): sampled text is plain decoding's."""

from spec_jax.drafters.small_model import SmallModel
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int, draft_model: Target) -> Engine:
    """Chains of four coupled tokens, verified by position-keyed match."""
    return Engine(target, max_len, drafter=SmallModel(draft_model, k=4))
