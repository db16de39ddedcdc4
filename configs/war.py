"""WAR: earlier trajectories of a prompt draft for its next ones while load is low; after its abstract.

A suffix search (SuffixDecoding, arXiv 2411.04975) in what was said to the same prompt. Under high load WAR places
requests over replicas instead, by their caches; here speculation is off then, and there are no replicas.
"""

from typing import Any

from spec_jax.control.throughput import Throughput
from spec_jax.drafters.siblings import Siblings
from spec_jax.engine.engine import Engine
from spec_jax.models.target import Target
from spec_jax.rollout.toggle import Toggle


def engine(target: Target, max_len: int) -> Engine:
    """Merged continuations of the six best places in the row and in earlier outputs, none in rows beside it."""
    drafter = Siblings(peers=0, memory=4096)
    return Engine(target, max_len, drafter=drafter, controller=Throughput(prior=64.0), widths=(1, 4, 8, 16))


def rollout() -> dict[str, Any]:
    """Speculation where the load lets it pay."""
    return {"toggle": Toggle()}
