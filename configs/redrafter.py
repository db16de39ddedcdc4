"""ReDrafter (arXiv 2403.09919): a recurrent head on the target's last hidden state, a beam of it joined to a tree."""

from spec_jax.drafters import medusa, recurrent
from spec_jax.drafters.recurrent import RecurrentConfig
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.topology.growth import Growth


def engine(target: Target, max_len: int, network: RecurrentConfig) -> Engine:
    """A beam of eight, five deep, by law and noise together; a prefix that several beams share is one node."""
    beam = Growth(nodes=41, depth=5, width=8, children=8, ranking="coupled", spare=False)
    return Engine(medusa.tapped(network, target), max_len, drafter=recurrent.drafter(network, beam))
