"""GOOSE (arXiv 2604.02047): a spine of matched text, branches of recycled successors, weighed by their chances."""

from spec_jax.control.throughput import Throughput
from spec_jax.drafters.goose import Goose
from spec_jax.drafters.recycling import Recycling
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target


def engine(target: Target, max_len: int) -> Engine:
    """A tree of up to 31 drafted tokens, of which a prefix is verified."""
    drafter = Goose(Recycling(target.vocab_size))
    return Engine(target, max_len, drafter=drafter, controller=Throughput(), widths=(1, 4, 8, 16, 32))
