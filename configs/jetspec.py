"""JetSpec (arXiv 2606.18394): a block-causal network, and a tree of its marginals' likeliest combinations."""

from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.drafter import BlockDrafter
from spec_jax.drafters.block.heads.head import Head, Plain
from spec_jax.drafters.block.shape import BestFirst
from spec_jax.engine.engine import Engine
from spec_jax.models.config import require
from spec_jax.models.target import Target

HEAD = Plain()


def engine(target: Target, max_len: int, network: BlockConfig, head: Head = HEAD) -> Engine:
    """63 drafted nodes, seven tokens a depth at most."""
    require(all(network.causal), "network", "one with bidirectional layers", "one whose layers are all causal")
    drafter = BlockDrafter(network, BestFirst(64, min(20, network.depth), children=7, ranking="coupled"), head)
    return Engine(drafter.tapped(target), max_len, drafter=drafter)
