"""Weaver (arXiv 2607.06763): a tiny transformer over each node's ancestors scores the block's candidates."""

from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.drafter import BlockDrafter
from spec_jax.drafters.block.heads.ancestor import Ancestor
from spec_jax.drafters.block.heads.head import Head
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.topology.growth import Growth

HEAD = Ancestor()


def engine(target: Target, max_len: int, network: BlockConfig, head: Head = HEAD) -> Engine:
    """32 drafted nodes, eight expanded at a time. A level at a time, where the paper takes the best nodes of any."""
    drafter = BlockDrafter(network, Growth(33, network.depth, width=8, children=4, ranking="coupled"), head)
    return Engine(drafter.tapped(target), max_len, drafter=drafter)
