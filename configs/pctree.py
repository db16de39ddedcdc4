"""PCTree (arXiv 2608.02123): a beam over logits that the parent's token corrects; the best nodes of all are kept."""

from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.drafter import BlockDrafter
from spec_jax.drafters.block.heads.head import Head
from spec_jax.drafters.block.heads.markov import Markov
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.topology.growth import Growth

HEAD = Markov()


def engine(target: Target, max_len: int, network: BlockConfig, head: Head = HEAD) -> Engine:
    """24 drafted nodes, a beam of four. The head is DSpark's, or DFlash 2's `Selector`."""
    drafter = BlockDrafter(network, Growth(25, network.depth, width=4, children=4, ranking="coupled"), head)
    return Engine(drafter.tapped(target), max_len, drafter=drafter)
