"""PARD (arXiv 2504.18583): a small model tuned to draft all depths in one pass over masks, for a family of targets."""

from spec_jax.drafters import parallel_model
from spec_jax.drafters.parallel_model import ParallelConfig
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.topology.growth import Growth


def engine(target: Target, max_len: int, network: ParallelConfig) -> Engine:
    """Chains as deep as the model was trained for, coupled."""
    d = network.depth
    chain = Growth(nodes=d + 1, depth=d, width=1, children=1, ranking="coupled")
    return Engine(target, max_len, drafter=parallel_model.drafter(network, chain))
