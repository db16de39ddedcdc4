"""Block Verification (arXiv 2403.10444): speculative sampling whose drawn chain is accepted as a whole, not by token.

The text has the target's law; it is not plain decoding's text for the same key.
"""

from spec_jax.drafters.small_model import SmallModel
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.verify.traversal import block


def engine(target: Target, max_len: int, draft_model: Target) -> Engine:
    """Chains of four sampled tokens."""
    return Engine(target, max_len, drafter=SmallModel(draft_model, k=4, mode="sampled"), rule=block)
