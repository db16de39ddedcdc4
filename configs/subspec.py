"""SubSpec: low-bit substitutes of the target's own layers draft for it; after its abstract.

Where the target is offloaded and where the substitutes stand is not modelled. The engine is that of a small model that
shares the target's noise (arXiv 2408.07978).
"""

import dataclasses
from typing import Any

from spec_jax.drafters.small_model import SmallModel
from spec_jax.engine.engine import Engine
from spec_jax.models import views

drafter_params = views.int8


def engine(target: Any, max_len: int) -> Engine:
    """Chains of up to six coupled tokens from the target with its linear maps in int8, for a `Llama` or `Qwen`."""
    return Engine(target, max_len, drafter=SmallModel(dataclasses.replace(target, taps=()), k=6))
