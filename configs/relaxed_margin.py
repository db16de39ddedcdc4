"""Margin-Aware Speculative Verification (arXiv 2601.15498) over a small draft model. RELAXED: it changes the text."""

from spec_jax.drafters.small_model import SmallModel
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.verify.relaxed import Relaxed


def engine(target: Target, max_len: int, draft_model: Target) -> Engine:
    """Chains of four tokens; the target's runner-up passes where it is less than half a logit behind."""
    return Engine(target, max_len, drafter=SmallModel(draft_model, k=4), rule=Relaxed.margin(0.5))
