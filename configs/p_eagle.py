"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head of a few layers that drafts all depths in one pass over masked pairs."""

from spec_jax.drafters.eagle import head
from spec_jax.drafters.eagle.config import EagleConfig
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int, network: EagleConfig) -> Engine:
    """Chains of five tokens, coupled and verified by position-keyed match."""
    return Engine(head.tapped(network, target), max_len, drafter=head.drafter(network, head.chain(5)))
