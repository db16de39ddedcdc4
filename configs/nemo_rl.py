"""NeMo-RL's speculative rollouts: any drafter, and exact verification (arXiv 2302.01318), as a rollout primitive.

After the abstract; the synchronous kind. Drafts are coupled, so that a key has one text with and without them.
"""

from typing import Any

from spec_jax.drafters.drafter import Drafter
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int, drafter: Drafter) -> Engine:
    """All that the drafter drafts; the target has the taps that it reads."""
    return Engine(target, max_len, drafter=drafter)


def rollout() -> dict[str, Any]:
    """Prompts as they come, with the log-probs that a trainer recomputes."""
    return {"order": "given", "convention": "tempered"}
