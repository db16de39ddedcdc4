"""SmartSpec: the draft's length is what promises the most accepted tokens per time, none included; after its abstract.

The small model shares the target's noise (arXiv 2408.07978).
"""

from spec_jax.control.throughput import Throughput
from spec_jax.drafters.small_model import SmallModel
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int, draft_model: Target) -> Engine:
    """Chains of six, of which as many are verified as the batch's goodput wants."""
    drafter = SmallModel(draft_model, k=6)
    return Engine(target, max_len, drafter=drafter, controller=Throughput(), widths=(1, 2, 3, 5, 7))
