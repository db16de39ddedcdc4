"""EESD (arXiv 2406.03853): the target's first layers and an adapter draft, Thompson sampling says how much is verified.

After its abstract. Verified by position-keyed match (arXiv 2408.07978).
"""

from spec_jax.control.thompson import Thompson
from spec_jax.drafters.early_exit import EarlyExitConfig
from spec_jax.drafters.small_model import SmallModel
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int, network: EarlyExitConfig) -> Engine:
    """Chains of up to eight coupled tokens; parameters are those of `EarlyExitParams.over`."""
    drafter = SmallModel(network.view(), k=8)
    return Engine(target, max_len, drafter=drafter, controller=Thompson(), widths=(1, 3, 5, 9))
