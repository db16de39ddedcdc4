"""SMART (arXiv 2604.09731): a tree's next node is verified only if it is worth more than its cost.

The paper's controller on Token Recycling's trees; the same rule is CaDDTree's (arXiv 2606.01813) and CAST's (arXiv
2610.00321), which use it on block drafters' trees.
"""

from spec_jax.control.marginal import Marginal
from spec_jax.drafters.recycling import Recycling
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int) -> Engine:
    """A fixed tree of 31 drafted tokens, cut by marginal benefit and cost."""
    drafter = Recycling(target.vocab_size)
    return Engine(target, max_len, drafter=drafter, controller=Marginal(), widths=(1, 4, 8, 16, 32))
