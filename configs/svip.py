"""SVIP: a draft ends where the entropy of the small model's law bounds acceptance too low; after its abstract.

Chains are drawn and verified by speculative sampling (arXiv 2211.17192): the text has the target's law, and is not
plain decoding's for the same key.
"""

from spec_jax.drafters.small_model import SmallModel
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.verify.rejection import rejection


def engine(target: Target, max_len: int, draft_model: Target) -> Engine:
    """Up to eight tokens, as long as 1 - sqrt(entropy) is at least 0.1."""
    drafter = SmallModel(draft_model, k=8, mode="sampled", least=0.1, sure="entropy")
    return Engine(target, max_len, drafter=drafter, rule=rejection)
