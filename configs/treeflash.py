"""TreeFlash (arXiv 2606.03819): a gated MLP of a row and the token before it makes marginals conditional."""

from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.drafter import BlockDrafter
from spec_jax.drafters.block.heads.swiglu import SwiGlu
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.topology.growth import Growth


def engine(target: Target, max_len: int, network: BlockConfig, head: SwiGlu) -> Engine:
    """32 drafted nodes; a frontier as wide as the paper's 16 candidates a depth."""
    drafter = BlockDrafter(network, Growth(33, network.depth, width=16, children=16, ranking="coupled"), head)
    return Engine(drafter.tapped(target), max_len, drafter=drafter)
