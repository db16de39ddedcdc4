"""Kangaroo: the target's first layers and an adapter draft, and stop where they are not sure; after its abstract.

So both exits are early: that of the layers, and that of the draft. Verified by position-keyed match (arXiv 2408.07978).
"""

from spec_jax.drafters.early_exit import EarlyExitConfig
from spec_jax.drafters.small_model import SmallModel
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int, network: EarlyExitConfig) -> Engine:
    """Chains of up to six coupled tokens; parameters are those of `EarlyExitParams.over`."""
    return Engine(target, max_len, drafter=SmallModel(network.view(), k=6, least=0.3))
