"""DART (arXiv 2601.19278): a tree over masked positions' logits, kept continuous by an n-gram table."""

from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.drafter import BlockDrafter
from spec_jax.drafters.block.heads.bigram import Bigram
from spec_jax.drafters.block.heads.head import Head
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.topology.growth import Growth

HEAD = Bigram()


def engine(target: Target, max_len: int, network: BlockConfig, head: Head = HEAD) -> Engine:
    """32 drafted nodes; the table raises the logits that the tree is chosen by."""
    drafter = BlockDrafter(network, Growth(33, network.depth, width=8, children=8, ranking="coupled"), head)
    return Engine(drafter.tapped(target), max_len, drafter=drafter)
