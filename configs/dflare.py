"""DFlare (arXiv 2606.02091): DFlash whose layers each mix the tapped layers of the target their own way."""

from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.drafter import BlockDrafter, chain
from spec_jax.drafters.block.heads.head import Head, Plain
from spec_jax.engine.engine import Engine
from spec_jax.models.config import require
from spec_jax.models.target import Target

HEAD = Plain()


def engine(target: Target, max_len: int, network: BlockConfig, head: Head = HEAD) -> Engine:
    """A chain as deep as the block; the network needs per-layer features."""
    require(network.per_layer_features, "network", "one without per_layer_features", "one with them")
    drafter = BlockDrafter(network, chain(network, head), head)
    return Engine(drafter.tapped(target), max_len, drafter=drafter)
