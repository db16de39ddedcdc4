"""DominoTree (arXiv 2607.08642): a tree of the likeliest paths by Domino's corrected logits."""

from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.drafter import BlockDrafter
from spec_jax.drafters.block.heads.gru import Domino
from spec_jax.drafters.block.heads.head import Head
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.topology.growth import Growth

HEAD = Domino()


def engine(target: Target, max_len: int, network: BlockConfig, head: Head = HEAD) -> Engine:
    """16 drafted nodes, eight expanded a level."""
    drafter = BlockDrafter(network, Growth(17, network.depth, width=8, children=8, ranking="coupled"), head)
    return Engine(drafter.tapped(target), max_len, drafter=drafter)
