"""EAGLE-3 (arXiv 2503.01840): a layer over features of three target layers drafts token by token."""

from spec_jax.drafters.eagle import head
from spec_jax.drafters.eagle.config import EagleConfig
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int, network: EagleConfig) -> Engine:
    """EAGLE-2's tree ranked by law and noise together, 60 nodes; verified by position-keyed match."""
    drafter = head.drafter(network, head.dynamic_tree(60, depth=8, width=10, ranking="coupled"))
    return Engine(head.tapped(network, target), max_len, drafter=drafter)
