"""Plain decoding through the speculative engine: no drafter, one token a round. The baseline of every speed-up."""

from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int) -> Engine:
    """One token a round."""
    return Engine(target, max_len)
