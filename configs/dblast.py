"""DBLast: a block's law is a mixture of products, and a path's conditional law verifies it (cf. arXiv 2602.06036)."""

from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.drafter import BlockDrafter
from spec_jax.drafters.block.heads.head import Head
from spec_jax.drafters.block.heads.mixture import Mixture
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.topology.branching import Branching
from spec_jax.verify.rejection import rejection

HEAD = Mixture()


def engine(target: Target, max_len: int, network: BlockConfig, head: Head = HEAD) -> Engine:
    """Chains drawn from the mixture, token by token; the text has the target's law."""
    drafter = BlockDrafter(network, Branching((1,) * network.depth, replacement=True), head)
    return Engine(drafter.tapped(target), max_len, drafter=drafter, rule=rejection)
