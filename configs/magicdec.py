"""MagicDec: the target drafts for itself with a cache of its last tokens alone; after its abstract.

The cache is StreamingLLM's (arXiv 2309.17453) without its sinks; with long texts in large batches, where the cache is
what a pass costs, drafting stays cheap.
"""

from typing import Any

from spec_jax.drafters.small_model import SmallModel
from spec_jax.engine.engine import Engine
from spec_jax.models import views


def drafter_params(target_params: Any) -> Any:
    """The target's own."""
    return target_params


def engine(target: Any, max_len: int) -> Engine:
    """Chains of four coupled tokens over the last 512, for a `Llama` or `Qwen` without a window of its own."""
    return Engine(target, max_len, drafter=SmallModel(views.windowed(target, 512), k=4))
