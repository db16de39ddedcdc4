"""DSpark (arXiv 2607.05147): a Markov head behind the block, and as many tokens verified as its confidence pays for."""

from spec_jax.control.throughput import Throughput
from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.drafter import BlockDrafter, chain
from spec_jax.drafters.block.heads.head import Head
from spec_jax.drafters.block.heads.markov import Markov
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target

HEAD = Markov()


def engine(target: Target, max_len: int, network: BlockConfig, head: Head = HEAD) -> Engine:
    """A chain with the head's own confidences; a batch-wide count by what they promise and what a node costs."""
    widths = (1, *range(3, network.depth + 1, 2), network.depth + 1)
    drafter = BlockDrafter(network, chain(network, head), head)
    return Engine(drafter.tapped(target), max_len, drafter=drafter, controller=Throughput(), widths=widths)
