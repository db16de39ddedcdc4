"""ResiSpec: several drawn candidates, the later ones reweighed to what the earlier ones left; after its abstract.

On the trees of SpecTr (arXiv 2310.15141). The text has the target's law, and is not plain decoding's for the same key.
"""

from spec_jax.drafters.model_tree import ModelTree
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.topology.branching import Branching
from spec_jax.verify.resispec import resispec


def engine(target: Target, max_len: int, draft_model: Target) -> Engine:
    """Four chains of four tokens behind the anchor."""
    drafter = ModelTree(draft_model, Branching((4, 1, 1, 1), replacement=True))
    return Engine(target, max_len, drafter=drafter, rule=resispec)
