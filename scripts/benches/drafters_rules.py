"""The exact rules that `bench.py drafters --rules` sets beside coupled trees, each with as many drafted nodes."""

from __future__ import annotations

import dataclasses
from typing import Any

from spec_jax.control.budget import Always
from spec_jax.drafters.block.drafter import BlockDrafter
from spec_jax.drafters.depth_tree import DepthTree
from spec_jax.drafters.head_tree import HeadTree
from spec_jax.engine.engine import Engine
from spec_jax.topology.branching import Branching
from spec_jax.verify.importance import importance
from spec_jax.verify.kseq import kseq
from spec_jax.verify.match import match
from spec_jax.verify.rejection import point_mass, rejection
from spec_jax.verify.resispec import resispec
from spec_jax.verify.traversal import block, traversal

from .drafters_systems import deepest, is_chain, shape_of, with_shape

RULES = {
    "point": (match, "point"),
    "point_mass": (point_mass, "point"),
    "speculative_sampling": (rejection, "chain"),
    "block_verification": (block, "chain"),
    "multi_candidate": (rejection, "sampled"),
    "k_seq": (kseq, "sampled"),
    "importance": (importance, "sampled"),
    "resispec": (resispec, "sampled"),
    "traversal_sampled": (traversal, "sampled"),
    "recursive_rejection": (rejection, "without_replacement"),
    "traversal": (traversal, "without_replacement"),
}
"""Names, rules and the drafts they are given. `multi_candidate` is MCSD's and SpecInfer's, `recursive_rejection` RSD's.

point: the same shape ranked by law alone. chain: a drawn chain. sampled, without_replacement: siblings drawn below the
anchor, with or without repeats, each with a drawn chain below it, half as deep as there are nodes. Draws are keyed by
text position and node, which no two rounds share, as the rules from leaf to root need it.
"""


def ruled(engine: Engine, nodes: int) -> dict[str, Engine]:
    """Every other exact rule at temperature 1, for trees of a drafter with a law; none for chains and for retrieval."""
    drafter = engine.drafter
    if not isinstance(drafter, BlockDrafter | DepthTree | HeadTree) or is_chain(shape_of(drafter)):
        return {}
    most, shape = deepest(drafter, nodes), shape_of(drafter)
    depth = min(most, max(1, nodes // 2))
    widths = (nodes // depth, *(1,) * (depth - 1))
    shapes: dict[str, Any] = {
        "point": dataclasses.replace(shape, ranking="point"),  # type: ignore[call-arg]
        "chain": Branching((1,) * most, replacement=True),
        "sampled": Branching(widths, replacement=True),
        "without_replacement": Branching(widths),
    }

    def make(rule: Any, kind: str) -> Engine:
        made = with_shape(drafter, shapes[kind])
        return dataclasses.replace(engine, drafter=made, controller=Always(), widths=(made.nodes,), rule=rule)

    return {name: make(*how) for name, how in RULES.items()}
