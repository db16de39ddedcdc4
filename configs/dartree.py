"""DARTree (arXiv 2608.13524): a supertree of width 12 by a sequential correction, pruned to its likeliest nodes."""

from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.drafter import BlockDrafter
from spec_jax.drafters.block.heads.head import Head
from spec_jax.drafters.block.heads.markov import Markov
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.topology.growth import Growth

HEAD = Markov()


def engine(target: Target, max_len: int, network: BlockConfig, head: Head = HEAD) -> Engine:
    """64 drafted nodes ("pruned"); the head may be a `Selector` or a `Bigram` table too."""
    drafter = BlockDrafter(network, Growth(65, network.depth, width=12, children=12, ranking="coupled"), head)
    return Engine(drafter.tapped(target), max_len, drafter=drafter)
