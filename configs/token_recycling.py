"""Token Recycling (arXiv 2408.08696): trees of the likeliest successors that earlier passes computed anyway."""

from spec_jax.control.throughput import Throughput
from spec_jax.drafters.recycling import Recycling
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int) -> Engine:
    """A fixed tree of 31 drafted tokens, of which a prefix is verified."""
    drafter = Recycling(target.vocab_size)
    return Engine(target, max_len, drafter=drafter, controller=Throughput(), widths=(1, 4, 8, 16, 32))
