"""TailSieve: the pool of the long tail, whose few rows a drafter such as DFlash (arXiv 2602.06036) or MTP speeds up.

After its abstract. `spec_jax.rollout.sieve` finds the tail by a partial rollout and sends it here.
"""

from typing import Any

from spec_jax.drafters.drafter import Drafter
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int, drafter: Drafter) -> Engine:
    """All that the drafter drafts; the target has the taps that it reads."""
    return Engine(target, max_len, drafter=drafter)


def rollout() -> dict[str, Any]:
    """Few rows at once, those that were longest before first."""
    return {"sizes": (1, 2, 4, 8), "order": "longest_first"}
