"""SuffixDecoding with a drafter to fall back on (arXiv 2411.04975): retrieval first, the drafter where it found little.

Unlike the paper's, a round that falls back verifies what was retrieved as well, where both fit.
"""

from spec_jax.control.throughput import Throughput
from spec_jax.drafters.combined import Combined
from spec_jax.drafters.drafter import Drafter
from spec_jax.drafters.suffix import Suffix
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int, drafter: Drafter) -> Engine:
    """The likeliest 15 nodes of both, of which a prefix is verified; the target has the taps that the drafter reads."""
    combined = Combined(drafter, Suffix(nodes=16), 16, enough=0.7)
    return Engine(target, max_len, drafter=combined, controller=Throughput(), widths=(1, 2, 4, 8, 16))
