"""BanditSpec (arXiv 2505.15141): drafters of several kinds, one a round, by upper confidence bounds on what they bring.

UCBSpec; `control.bandit.Exp3` in its place is EXP3Spec. The arms here need no training.
"""

from spec_jax.control.bandit import Ucb
from spec_jax.drafters.chosen import Chosen
from spec_jax.drafters.ngram import NGram
from spec_jax.drafters.recycling import Recycling
from spec_jax.drafters.suffix import Suffix
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int) -> Engine:
    """Prompt lookup, suffixes or recycled successors, sixteen nodes each."""
    arms = (NGram(k=15), Suffix(nodes=16), Recycling(target.vocab_size, nodes=16))
    return Engine(target, max_len, drafter=Chosen(arms, Ucb()))
