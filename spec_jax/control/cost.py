"""What a round costs as a function of the nodes it verifies."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Seconds (or any unit) of a round at some node counts per row, ascending; interpolated between, extended beyond.

    Controllers read it to weigh nodes against time. It never decides what is emitted, only how fast.
    """

    nodes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check the table."""
        if len(self.nodes) != len(self.seconds) or not self.nodes:
            raise ValueError(f"seconds: got {len(self.seconds)} for {len(self.nodes)} node counts, takes one for each")
        if list(self.nodes) != sorted(set(self.nodes)) or self.nodes[0] < 1:
            raise ValueError(f"nodes: got {self.nodes}, takes ascending counts of at least 1")
        if not all(np.isfinite(s) and s > 0 for s in self.seconds):
            raise ValueError(f"seconds: got {self.seconds}, takes positive numbers")

    def at(self, widths: tuple[int, ...]) -> Float[Array, "w"]:
        """Costs of the given node counts, relative to the table's first entry."""
        return jnp.asarray(np.array([self.of(w) / self.seconds[0] for w in widths], np.float32))

    def of(self, width: int) -> float:
        """The cost of a node count: between the table's entries, or beyond its last two, on the line through both."""
        x, y = self.nodes, self.seconds
        if width <= x[-1] or len(x) == 1:
            return float(np.interp(width, x, y))
        return y[-1] + (y[-1] - y[-2]) / (x[-1] - x[-2]) * (width - x[-1])

    @classmethod
    def from_compiler(cls, name: str, topology: str) -> CostModel:
        """Seconds of a round of a published model on a TPU topology, read from libtpu's compiled program; no chip ran.

        The table (`pods.json`, written by scripts/aot_pod.py; docs/pods_cost.md says how) gives for each case its mesh,
        rows, context and drafter too. Seconds are a roofline without latencies: ratios mean more than values.

        Args:
            name: a model, such as "Qwen3.5-397B-A17B".
            topology: a slice, such as "v5e:16x16".

        Raises:
            ValueError: for a pair that the table lacks, listing those it has.
        """
        table = compiled_shapes()
        found = table.get(f"{name} {topology}")
        if found is None:
            there = ", ".join(f"({x['name']}, {x['topology']})" for x in table.values())
            raise ValueError(f"name, topology: got ({name}, {topology}), takes one of {there}")
        rounds = sorted((int(n), x["seconds"]) for n, x in found["rounds"].items())
        return cls(tuple(n for n, _ in rounds), tuple(seconds for _, seconds in rounds))


CPU = CostModel(nodes=(1, 2, 4, 8, 16, 32), seconds=(1.0, 1.4, 1.45, 1.7, 2.15, 3.3))
"""SmolLM2-135M, float32, batch 1, on two cores (`scripts/bench.py decode` prints this machine's own)."""


def compiled_shapes() -> dict[str, dict]:
    """The table that `CostModel.from_compiler` reads: by "name topology", what was compiled and what each N takes."""
    return json.loads(Path(__file__).with_name("pods.json").read_text(encoding="utf-8"))["shapes"]
