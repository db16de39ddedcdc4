"""EAGLE-2 (arXiv 2406.16858): EAGLE-1's layer (arXiv 2401.15077) in a dynamic tree, the likeliest of what it offers."""

from spec_jax.drafters.eagle import head
from spec_jax.drafters.eagle.config import EagleConfig
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int, network: EagleConfig) -> Engine:
    """60 nodes by the head's law alone; verified by position-keyed match."""
    drafter = head.drafter(network, head.dynamic_tree(60, depth=6, width=10))
    return Engine(head.tapped(network, target), max_len, drafter=drafter)
