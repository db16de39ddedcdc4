"""ADED (arXiv 2407.12021): a search by upper confidence bounds in the laws behind n-grams; after its abstract."""

from spec_jax.control.throughput import Throughput
from spec_jax.drafters.aded import Aded
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int) -> Engine:
    """Up to 31 tokens, of which a prefix is verified."""
    drafter = Aded(target.vocab_size)
    return Engine(target, max_len, drafter=drafter, controller=Throughput(), widths=(1, 4, 8, 16, 32))
