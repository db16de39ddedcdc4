"""xPress (arXiv 2608.02438): a causal refiner of the whole block, in six parallel passes."""

from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.drafter import BlockDrafter, chain
from spec_jax.drafters.block.heads.head import Head
from spec_jax.drafters.block.heads.jacobi import Jacobi
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target

HEAD = Jacobi()


def engine(target: Target, max_len: int, network: BlockConfig, head: Head = HEAD) -> Engine:
    """A chain as deep as the block, no token after another."""
    drafter = BlockDrafter(network, chain(network, head), head)
    return Engine(drafter.tapped(target), max_len, drafter=drafter)
