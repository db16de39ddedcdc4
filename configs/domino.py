"""Domino (arXiv 2605.29707): a recurrent state of the drafted tokens corrects the block's logits."""

from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.drafter import BlockDrafter, chain
from spec_jax.drafters.block.heads.gru import Domino
from spec_jax.drafters.block.heads.head import Head
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target

HEAD = Domino()


def engine(target: Target, max_len: int, network: BlockConfig, head: Head = HEAD) -> Engine:
    """A chain as deep as the block."""
    drafter = BlockDrafter(network, chain(network, head), head)
    return Engine(drafter.tapped(target), max_len, drafter=drafter)
