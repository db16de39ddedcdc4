"""CLaSp (arXiv 2505.24196): the target without the layers whose absence changes its hidden states least, chosen anew.

Half the layers are skipped, and a set lasts four rounds; the paper too renews its set less often than every round.
"""

from typing import Any

from spec_jax.drafters.skipping import clasp
from spec_jax.drafters.skipping.drafter import Skipping
from spec_jax.engine.engine import Engine
from spec_jax.models.llama import Llama


def drafter_params(target_params: Any) -> Any:
    """The target's own."""
    return target_params


def engine(target: Llama, max_len: int) -> Engine:
    """Chains of up to eight coupled tokens, for a `Llama` of at least three layers; it gets the taps of all of them."""
    drafter = Skipping(target, clasp.Clasp(max(target.config.num_layers // 2, 1), every=4), k=8, least=0.3)
    return Engine(clasp.taps(target), max_len, drafter=drafter)
