"""DIVERSED: speculative sampling (arXiv 2211.17192) against a blend of target and drafter. RELAXED: it changes the law.

The weight is a constant here; the paper's depends on task and context, which `Relaxed.blend` takes as a function.
"""

from spec_jax.drafters.small_model import SmallModel
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.verify.relaxed import Relaxed


def engine(target: Target, max_len: int, draft_model: Target) -> Engine:
    """Chains of four sampled tokens, verified against 0.8 p + 0.2 q."""
    drafter = SmallModel(draft_model, k=4, mode="sampled")
    return Engine(target, max_len, drafter=drafter, rule=Relaxed.blend(0.8))
