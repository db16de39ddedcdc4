"""DFlash 2: DFlash (arXiv 2602.06036) with dynamic convolutions in the network, and a selector of candidates."""

from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.drafter import BlockDrafter, chain
from spec_jax.drafters.block.heads.head import Head
from spec_jax.drafters.block.heads.selector import Selector
from spec_jax.engine.engine import Engine
from spec_jax.models.config import require
from spec_jax.models.target import Target

HEAD = Selector()


def engine(target: Target, max_len: int, network: BlockConfig, head: Head = HEAD) -> Engine:
    """A chain over the 16 best candidates of every slot; the network needs its convolutions."""
    require(network.conv_kernel_size is not None, "network", "one without convolutions", "one with conv_kernel_size")
    drafter = BlockDrafter(network, chain(network, head), head)
    return Engine(drafter.tapped(target), max_len, drafter=drafter)
