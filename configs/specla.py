"""SpecLA: chains and trees for linear-attention targets, confidence pruning (target: Gated DeltaNet, arXiv 2412.06464).

Its verifier is how every recurrent target here scores: factors are kept per node, the accepted path's are folded in.
The drafter is EAGLE-style (arXiv 2401.15077, 2503.01840): a layer over the target's features. A chain is width =
children = 1.
"""

from spec_jax.control.confident import Confident
from spec_jax.drafters.eagle import head
from spec_jax.drafters.eagle.config import EagleConfig
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int, network: EagleConfig) -> Engine:
    """Six levels, four nodes expanded a level, 15 kept, of which the likely ones are verified."""
    drafter = head.drafter(network, head.dynamic_tree(16, depth=6, width=4))
    target, widths = head.tapped(network, target), (1, 2, 4, 8, 16)
    return Engine(target, max_len, drafter=drafter, controller=Confident(0.05), widths=widths)
