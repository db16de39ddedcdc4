"""Carryover Drafting, on DFlash (arXiv 2602.06036): the target's hidden states of rejected tokens as further context.

They have a learned mark and are replaced every round; the cache of committed tokens never holds them.
"""

from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.drafter import BlockDrafter, chain
from spec_jax.drafters.block.heads.head import Head, Plain
from spec_jax.engine.engine import Engine
from spec_jax.models.config import require
from spec_jax.models.target import Target

HEAD = Plain()


def engine(target: Target, max_len: int, network: BlockConfig, head: Head = HEAD) -> Engine:
    """A chain as deep as the block, coupled; the network needs rejected="carryover"."""
    require(network.rejected == "carryover", "network", f"one with rejected={network.rejected!r}", "carryover")
    drafter = BlockDrafter(network, chain(network, head), head)
    return Engine(drafter.tapped(target), max_len, drafter=drafter)
