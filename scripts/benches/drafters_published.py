"""What the papers say one drafter gains over another, to be printed beside what is measured here."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Delta:
    """`row` over `base`: the published gain, least and greatest (0.13: by 13 %), in what, and where it is from."""

    row: str
    base: str
    gain: tuple[float, float]
    measure: str
    source: str

    @property
    def name(self) -> str:
        """Both rows."""
        return f"{self.row} over {self.base}"


_LENGTH, _SPEED = "acceptance length", "speed-up"
_DOMINO_TREE = "arXiv 2607.08642, its repository's tables: Qwen3-4B and 8B, greedy, 16 nodes, mean of eight benchmarks"
_DSPARK = "arXiv 2607.05147, table 1: Qwen3-4B and 8B, temperature 1, chains of 7, mean of nine benchmarks"

PUBLISHED = (
    Delta("ddtree", "dflash", (0.125, 0.129), _LENGTH, _DOMINO_TREE),
    Delta("domino", "dflash", (0.147, 0.198), _LENGTH, _DOMINO_TREE),
    Delta("domino_tree", "domino", (0.104, 0.113), _LENGTH, _DOMINO_TREE),
    Delta("domino_tree", "ddtree", (0.135, 0.171), _LENGTH, _DOMINO_TREE),
    Delta("dflash", "eagle3", (0.071, 0.126), _LENGTH, _DSPARK),
    Delta("dspark", "dflash", (0.163, 0.184), _LENGTH, _DSPARK),
    Delta("pctree", "dspark", (0.031, 0.295), "not said", "arXiv 2608.02123, abstract: Qwen3 targets"),
    Delta("treeflash", "ddtree", (0.12, 0.12), _LENGTH, "arXiv 2606.03819: Qwen3 targets"),
    Delta("weaver", "dflash", (0.163, 0.247), _SPEED, "arXiv 2607.06763, abstracts of two revisions: Qwen3.6-27B"),
    Delta("eagle3_tree", "eagle3", (0.2, 0.4), _SPEED, "arXiv 2406.16858: EAGLE-2's tree over EAGLE-1's fixed one"),
)

LOSS = 0.13
LOSS_SOURCE = "DFlash for Qwen3-4B, 6.54 to 5.69, arXiv 2602.06036, table 1"
"""What published block drafters lose of greedy decoding's acceptance length at temperature 1, and where it is from."""
