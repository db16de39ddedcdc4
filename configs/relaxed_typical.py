"""Typical acceptance (Medusa, arXiv 2401.10774) over a small draft model. RELAXED: it changes the text."""

from spec_jax.drafters.small_model import SmallModel
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.verify.relaxed import Relaxed


def engine(target: Target, max_len: int, draft_model: Target) -> Engine:
    """Chains of four tokens; one passes above min(0.09, 0.3 exp(-entropy)) of the target's probability."""
    return Engine(target, max_len, drafter=SmallModel(draft_model, k=4), rule=Relaxed.typical(0.09, 0.3))
