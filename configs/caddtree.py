"""CaDDTree (arXiv 2606.01813): DDTree's tree, ended where the next node is not worth its cost."""

from spec_jax.control.marginal import Marginal
from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.drafter import BlockDrafter
from spec_jax.drafters.block.heads.head import Head, Plain
from spec_jax.drafters.block.shape import BestFirst
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target

HEAD = Plain()


def engine(target: Target, max_len: int, network: BlockConfig, head: Head = HEAD) -> Engine:
    """Up to 64 drafted nodes, in order of their chance; costs are read between the compiled widths."""
    drafter = BlockDrafter(network, BestFirst(65, network.depth, ranking="coupled"), head)
    return Engine(drafter.tapped(target), max_len, drafter=drafter, controller=Marginal(), widths=(1, 9, 17, 33, 65))
