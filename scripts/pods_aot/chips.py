"""What a pod's chips can do, from the maker's pages (docs.cloud.google.com/tpu/docs/v5e and v6e, read in 2026)."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peak bfloat16 operations, bytes of main memory and bytes over the links a second; main memory in GiB.

    The links are four ports, two to a dimension of the torus. A collective along one mesh axis is taken to use one
    dimension, hence two ports, and what leaves by them: a quarter of the published bidirectional figure.
    """

    operations: float
    bandwidth: float
    links: float
    memory_gib: float


CHIPS = {
    "v5e": Chip(operations=197e12, bandwidth=819e9, links=400e9 / 4, memory_gib=16),
    "v6e": Chip(operations=918e12, bandwidth=1640e9, links=800e9 / 4, memory_gib=32),
}


def chip(topology: str) -> Chip:
    """The chip of a topology such as v5e:16x16. Raises ValueError for a kind that is not in CHIPS."""
    kind = topology.partition(":")[0]
    if kind not in CHIPS:
        raise ValueError(f"topology: got {topology!r}, takes one of {', '.join(f'{name}:XxY' for name in CHIPS)}")
    return CHIPS[kind]
