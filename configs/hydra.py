"""Hydra (arXiv 2402.05109): Medusa's heads, each of which also reads the tokens drafted before its own."""

from spec_jax.drafters import medusa
from spec_jax.drafters.medusa import MedusaConfig
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.topology.growth import Growth


def engine(target: Target, max_len: int, network: MedusaConfig) -> Engine:
    """A tree of 32 nodes, 8 wide, as deep as there are heads, by law and noise together."""
    width = min(8, network.vocab_size)
    growth = Growth(nodes=32, depth=network.num_heads, width=width, children=width, ranking="coupled")
    return Engine(medusa.tapped(network, target), max_len, drafter=medusa.drafter(network, growth))
