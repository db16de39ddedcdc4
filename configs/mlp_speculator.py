"""IBM's MLP speculator (arXiv 2404.19124): a stage per token on the target's last hidden state and the token before."""

from spec_jax.drafters import medusa, mlp_speculator
from spec_jax.drafters.mlp_speculator import MlpConfig
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.topology.growth import Growth


def engine(target: Target, max_len: int, network: MlpConfig) -> Engine:
    """Five candidates, as deep as there are stages, by law and noise together; what several begin with is one node."""
    width, depth = min(5, network.vocab_size), network.num_stages
    beam = Growth(1 + depth * width, depth, width, children=width, ranking="coupled", spare=False)
    return Engine(medusa.tapped(network, target), max_len, drafter=mlp_speculator.drafter(network, beam))
