"""ReTrace, on DFlash (arXiv 2602.06036): the drafter's rows of a rejected suffix, let into the next block by a gate.

The target's hidden states of the same pass correct them; masks alone stand where nothing was rejected.
"""

from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.drafter import BlockDrafter, chain
from spec_jax.drafters.block.heads.head import Head, Plain
from spec_jax.engine.engine import Engine
from spec_jax.models.config import require
from spec_jax.models.target import Target

HEAD = Plain()


def engine(target: Target, max_len: int, network: BlockConfig, head: Head = HEAD) -> Engine:
    """A chain as deep as the block, coupled; the network needs rejected="retrace"."""
    require(network.rejected == "retrace", "network", f"one with rejected={network.rejected!r}", "retrace")
    drafter = BlockDrafter(network, chain(network, head), head)
    return Engine(drafter.tapped(target), max_len, drafter=drafter)
