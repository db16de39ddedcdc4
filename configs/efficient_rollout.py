"""EfficientRollout (arXiv 2606.18967): every policy, in eight bits, drafts for itself, where a round's cost allows it.

Draft length follows acceptance: `Throughput` chooses how much of a chain is verified. Our reading of the abstract.
"""

import dataclasses
from typing import Any

from spec_jax.control.throughput import Throughput
from spec_jax.drafters.small_model import SmallModel
from spec_jax.engine.engine import Engine
from spec_jax.models import views
from spec_jax.rollout.toggle import Toggle

drafter_params = views.int8


def engine(target: Any, max_len: int) -> Engine:
    """Chains of up to six coupled tokens from the target with its linear maps in int8, for a `Llama` or `Qwen`."""
    drafter = SmallModel(dataclasses.replace(target, taps=()), k=6)
    return Engine(target, max_len, drafter=drafter, controller=Throughput(), widths=(1, 2, 3, 5, 7))


def rollout() -> dict[str, Any]:
    """Speculation where it pays at the batch's size."""
    return {"toggle": Toggle()}
