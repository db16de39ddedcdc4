"""LiLiCorr (arXiv 2608.20530): neighbouring candidates must fit by their "out" and "in" vectors."""

from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.drafter import BlockDrafter, chain
from spec_jax.drafters.block.heads.head import Head
from spec_jax.drafters.block.heads.lattice import Lattice
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target

HEAD = Lattice()


def engine(target: Target, max_len: int, network: BlockConfig, head: Head = HEAD) -> Engine:
    """A left-to-right walk over eight candidates a slot."""
    drafter = BlockDrafter(network, chain(network, head), head)
    return Engine(drafter.tapped(target), max_len, drafter=drafter)
