"""SWIFT (arXiv 2410.06916): the target without some layers, a set searched for while it writes.

The share of skipped layers, the window and the ends of the search are the paper's; a layer is skipped whole.
"""

from typing import Any

from spec_jax.drafters.skipping.drafter import Skipping
from spec_jax.drafters.skipping.swift import Swift
from spec_jax.engine.engine import Engine
from spec_jax.models.llama import Llama


def drafter_params(target_params: Any) -> Any:
    """The target's own."""
    return target_params


def engine(target: Llama, max_len: int) -> Engine:
    """Chains of up to eight coupled tokens, for a `Llama` of at least three layers."""
    skips = max(round(0.45 * target.config.num_layers), 1)
    return Engine(target, max_len, drafter=Skipping(target, Swift(skips), k=8, least=0.3))
