"""KNN-SSD (arXiv 2505.16162): the target without some layers, a set for each domain of prompts; after its abstract.

The sets are found as SWIFT's (arXiv 2410.06916), on the texts of the domain alone.
"""

from typing import Any

from spec_jax.drafters.skipping import knn
from spec_jax.drafters.skipping.drafter import Skipping
from spec_jax.drafters.skipping.swift import Swift
from spec_jax.engine.engine import Engine
from spec_jax.models.llama import Llama


def drafter_params(target_params: Any) -> Any:
    """The target's own."""
    return target_params


def engine(target: Llama, max_len: int) -> Engine:
    """Chains of up to eight coupled tokens, for a `Llama` of at least three layers; it gets the tap of its last one."""
    search = knn.Knn(Swift(max(round(0.45 * target.config.num_layers), 1)))
    return Engine(knn.taps(target), max_len, drafter=Skipping(target, search, k=8, least=0.3))
