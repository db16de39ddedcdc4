"""STAND (arXiv 2506.04708): trees from the target's laws behind the same n-grams, and the position's noise."""

from spec_jax.control.throughput import Throughput
from spec_jax.drafters.stand import Stand
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int) -> Engine:
    """Up to 31 tokens, of which a prefix is verified."""
    return Engine(target, max_len, drafter=Stand(target.vocab_size), controller=Throughput(), widths=(1, 4, 8, 16, 32))
