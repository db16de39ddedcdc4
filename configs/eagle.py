"""EAGLE (EAGLE-1, arXiv 2401.15077): its layer over the target's last features, a fixed tree of drawn tokens.

Siblings are drawn without replacement and tried one after another against what is left of the target's law. The text
has the target's law; it is not plain decoding's text for the same key.
"""

from spec_jax.drafters.eagle import head
from spec_jax.drafters.eagle.config import EagleConfig
from spec_jax.engine.engine import Engine
from spec_jax.models.config import require
from spec_jax.models.target import Target
from spec_jax.topology.branching import Branching
from spec_jax.verify.rejection import rejection


def engine(target: Target, max_len: int, network: EagleConfig) -> Engine:
    """Widths by depth in the place of the published list of paths: 4, 2, then chains, 28 nodes and 4 deep."""
    require(network.inputs == "fused", "network", f"one with inputs={network.inputs!r}", "fused")
    drafter = head.drafter(network, Branching((4, 2, 1, 1)))
    return Engine(head.tapped(network, target), max_len, drafter=drafter, rule=rejection)
