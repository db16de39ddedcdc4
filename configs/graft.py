"""Graft (arXiv 2605.20104): prune a draft tree, fill the room with retrieved continuations.

The paper prunes EAGLE-3's trees; without a trained drafter the tree is Token Recycling's.
"""

from spec_jax.control.throughput import Throughput
from spec_jax.drafters.grafted import Grafted
from spec_jax.drafters.recycling import Recycling
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int) -> Engine:
    """The likeliest 23 recycled tokens, and retrieved ones in the room of the other 8."""
    drafter = Grafted(Recycling(target.vocab_size))
    return Engine(target, max_len, drafter=drafter, controller=Throughput(), widths=(1, 4, 8, 16, 32))
