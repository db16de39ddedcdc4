"""EAGLE-3 (arXiv 2503.01840) against attention drift: normed outputs go on to the next step, all taps are normed."""

from spec_jax.drafters.eagle import head
from spec_jax.drafters.eagle.config import EagleConfig
from spec_jax.engine.engine import Engine
from spec_jax.models.config import require
from spec_jax.models.target import Target


def engine(target: Target, max_len: int, network: EagleConfig) -> Engine:
    """EAGLE-3's tree over a head that is normed in both places (EAGLE-3.1)."""
    require(network.norm_output, "norm_output", network.norm_output, "True")
    require(network.feature_norm == "each", "feature_norm", network.feature_norm, "each")
    drafter = head.drafter(network, head.dynamic_tree(60, depth=8, width=10, ranking="coupled"))
    return Engine(head.tapped(network, target), max_len, drafter=drafter)
