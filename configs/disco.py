"""DISCO (arXiv 2405.04304): a draft ends where a classifier gives its next token too little chance; after its abstract.

`stopping.fit` trains a classifier on the target's texts; without, the chance is the small model's own. Chains are
coupled to the target's noise (arXiv 2408.07978).
"""

from spec_jax.drafters.small_model import SmallModel
from spec_jax.drafters.stopping import Classifier
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int, draft_model: Target) -> Engine:
    """Up to eight tokens, each with a chance of at least 0.4."""
    return Engine(target, max_len, drafter=SmallModel(draft_model, k=8, least=0.4, sure=Classifier()))
