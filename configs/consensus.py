"""Consensus drafting (arXiv 2503.05330): what parallel samples of the same prompt say drafts for one another.

As a suffix search over siblings, in our reading; a rollout engine adds their earlier samples (`rollout.memory`).
"""

from spec_jax.control.throughput import Throughput
from spec_jax.drafters.siblings import Siblings
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int) -> Engine:
    """Merged continuations of the six best places in the row and its siblings, up to 15 tokens."""
    return Engine(target, max_len, drafter=Siblings(), controller=Throughput(prior=64.0), widths=(1, 4, 8, 16))
