"""The importance-sampling scheme for several drafts (arXiv 2410.18234): choose a candidate, then accept it as if alone.

The text has the target's law; it is not plain decoding's text for the same key.
"""

from spec_jax.drafters.model_tree import ModelTree
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.topology.branching import Branching
from spec_jax.verify.importance import importance


def engine(target: Target, max_len: int, draft_model: Target) -> Engine:
    """Two chains of four tokens behind the anchor."""
    drafter = ModelTree(draft_model, Branching((2, 1, 1, 1), replacement=True))
    return Engine(target, max_len, drafter=drafter, rule=importance)
