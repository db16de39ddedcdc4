"""MTP / NEXTN: the target's own multi-token-prediction head drafts (DeepSeek-V3, arXiv 2412.19437; Qwen3-Next).

The head is used on its own output for every further token, three steps deep as in FastMTP (arXiv 2509.18362).
"""

from spec_jax.drafters import mtp
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target

drafter_params = mtp.params


def engine(target: Target, max_len: int) -> Engine:
    """Chains of three tokens, verified by position-keyed match."""
    target = mtp.tapped(target)
    return Engine(target, max_len, drafter=mtp.drafter(target, mtp.chain(3)))
