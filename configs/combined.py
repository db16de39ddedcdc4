"""RASD (arXiv 2503.03434): a drafter's tree and retrieved continuations, fused by their longest common prefixes.

The paper retrieves from a datastore and prunes with the drafter; here the text and earlier outputs are the store.
"""

from spec_jax.control.throughput import Throughput
from spec_jax.drafters.combined import Combined
from spec_jax.drafters.drafter import Drafter
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int, drafter: Drafter) -> Engine:
    """The likeliest 31 nodes of both, of which a prefix is verified; the target has the taps that the drafter reads."""
    combined = Combined(drafter)
    return Engine(target, max_len, drafter=combined, controller=Throughput(), widths=(1, 4, 8, 16, 32))
