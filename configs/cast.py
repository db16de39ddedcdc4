"""CAST (arXiv 2610.00321): DDTree's tree of eight tokens a slot, cut on a grid of sizes by one pool for the batch."""

from spec_jax.control.marginal import Marginal
from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.drafter import BlockDrafter
from spec_jax.drafters.block.heads.head import Head, Plain
from spec_jax.drafters.block.shape import BestFirst
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target

HEAD = Plain()


def engine(target: Target, max_len: int, network: BlockConfig, head: Head = HEAD) -> Engine:
    """15 to 63 drafted nodes, by their chance against the slope of the cost."""
    drafter = BlockDrafter(network, BestFirst(64, network.depth, children=8, ranking="coupled"), head)
    return Engine(drafter.tapped(target), max_len, drafter=drafter, controller=Marginal(), widths=(16, 32, 48, 64))
