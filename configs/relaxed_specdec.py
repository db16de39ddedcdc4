"""SpecDec's Spec-Verification (arXiv 2203.16487) over a small draft model. RELAXED: it changes the text.

The paper's Spec-Drafter is a block-parallel model of its own; here any small model drafts.
"""

from spec_jax.drafters.small_model import SmallModel
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.verify.relaxed import Relaxed


def engine(target: Target, max_len: int, draft_model: Target) -> Engine:
    """Chains of four tokens; one passes among the target's three likeliest, at most one nat below the best."""
    return Engine(target, max_len, drafter=SmallModel(draft_model, k=4), rule=Relaxed.specdec(top_k=3, tau=1.0))
