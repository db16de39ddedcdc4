"""DDTree (arXiv 2604.12989): the likeliest combinations of a block's per-slot tokens."""

from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.drafter import BlockDrafter
from spec_jax.drafters.block.heads.head import Head, Plain
from spec_jax.drafters.block.shape import BestFirst
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target

HEAD = Plain()


def engine(target: Target, max_len: int, network: BlockConfig, head: Head = HEAD) -> Engine:
    """32 drafted nodes."""
    drafter = BlockDrafter(network, BestFirst(33, network.depth, ranking="coupled"), head)
    return Engine(drafter.tapped(target), max_len, drafter=drafter)
