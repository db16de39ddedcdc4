"""Training-free multi-token prediction by probing the target itself with mask tokens; after its abstract.

A mask's embedding is the mean of all embeddings; the likeliest tokens behind each mask make a tree, which DDTree
(arXiv 2604.12989) grows. The paper verifies a draft and probes for the next one in one pass; here these are two.
"""

import dataclasses
from typing import Any

from spec_jax.drafters import parallel_model
from spec_jax.drafters.parallel_model import ParallelModel
from spec_jax.engine.engine import Engine
from spec_jax.topology.growth import Growth


def drafter_params(target_params: Any) -> Any:
    """The target's arrays but the embedding, in whose copy the last token is the mask."""
    return parallel_model.with_mean_mask(target_params, -1)


def engine(target: Any, max_len: int) -> Engine:
    """Trees of 16 nodes, three deep, for a `Llama` or `Qwen`."""
    growth = Growth(nodes=16, depth=3, width=5, children=5, ranking="coupled")
    probed = dataclasses.replace(target, taps=())
    return Engine(target, max_len, drafter=ParallelModel(probed, target.vocab_size - 1, growth))
