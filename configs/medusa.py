"""Medusa (arXiv 2401.10774): heads on the last hidden state, one per token, in a tree whose shape is fixed."""

from spec_jax.drafters import medusa
from spec_jax.drafters.depth_tree import Choices
from spec_jax.drafters.medusa import MedusaConfig
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.topology.static import likeliest

RATES = (0.6, 0.14, 0.07, 0.04, 0.03, 0.02, 0.02, 0.01)


def engine(target: Target, max_len: int, network: MedusaConfig) -> Engine:
    """The 64 likeliest nodes if the i-th guess of a head is right in RATES[i] of cases; exact match, not typical."""
    rates = RATES[: network.vocab_size]
    drafter = medusa.drafter(network, Choices(likeliest(rates, 64, network.num_heads), ranking="coupled"))
    return Engine(medusa.tapped(network, target), max_len, drafter=drafter)
