"""SuffixDecoding (arXiv 2411.04975): draft what followed the longest match, in this text or in earlier outputs.

Draft length grows with the match; how much of the draft is verified is weighed against its measured cost.
"""

from spec_jax.control.throughput import Throughput
from spec_jax.drafters.suffix import Suffix
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int) -> Engine:
    """Merged continuations of the four best places, up to 31 tokens."""
    return Engine(target, max_len, drafter=Suffix(), controller=Throughput(prior=64.0), widths=(1, 4, 8, 16, 32))
