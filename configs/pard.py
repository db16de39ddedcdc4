"""PARD (arXiv 2504.18583): a small model tuned to draft all depths in one pass over masks, for a family of targets."""

from spec_jax.drafters.parallel_model import ParallelModel
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.topology.growth import Growth


def engine(target: Target, max_len: int, draft_model: Target) -> Engine:
    """Chains of eight, coupled; the mask is the vocabulary's last id (published models name theirs as pard_token)."""
    chain = Growth(nodes=9, depth=8, width=1, children=1, ranking="coupled")
    return Engine(target, max_len, drafter=ParallelModel(draft_model, draft_model.vocab_size - 1, chain))
