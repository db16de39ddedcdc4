"""REST (arXiv 2311.08252): draft what followed the longest end of the text in a corpus, the most frequent first.

The drafter's parameters are the corpus: `spec_jax.drafters.rest.build_store(documents)`, of token ids.
"""

from spec_jax.control.throughput import Throughput
from spec_jax.drafters.rest import Rest
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int) -> Engine:
    """Up to 63 tokens, 10 deep, behind matches of up to 16 tokens, of which a prefix is verified."""
    return Engine(target, max_len, drafter=Rest(), controller=Throughput(prior=64.0), widths=(1, 8, 16, 32, 64))
