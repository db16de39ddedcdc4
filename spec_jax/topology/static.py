"""Trees whose shape is known before any token is: a parent and a rank per node, filled with ranked tokens later."""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spec_jax.topology.compact import LEAST
from spec_jax.topology.pool import Pool, best
from spec_jax.tree import Draft


@dataclasses.dataclass(frozen=True)
class Template:
    """A tree's shape. Node i hangs below parent[i] and holds the rank[i]-th likeliest token there, counted from 0.

    Hashable, so it may be a static argument. The root, node 0, has parent -1 and rank 0.

    Raises:
        ValueError: for a parent that does not stand before its child, or two siblings of one rank.
    """

    parent: tuple[int, ...]
    rank: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check that it is a tree."""
        if len(self.parent) != len(self.rank) or self.parent[:1] != (-1,) or self.rank[:1] != (0,):
            raise ValueError(
                f"parent: got {self.parent} for the ranks {self.rank}, takes one of each per node, the root's -1 and 0"
            )
        if not all(0 <= parent < i for i, parent in enumerate(self.parent[1:], 1)):
            raise ValueError(f"parent: got {self.parent}, takes an earlier node for every node but the root")
        places = list(zip(self.parent, self.rank, strict=True))
        if len(set(places)) < len(places) or min(self.rank) < 0:
            raise ValueError(f"rank: got {self.rank} below {self.parent}, takes ranks of at least 0, once per parent")

    @property
    def nodes(self) -> int:
        """Number of nodes, the root among them."""
        return len(self.parent)

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of every node from the root."""
        depths = [0]
        for parent in self.parent[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Longest root path."""
        return max(self.depths)

    @property
    def width(self) -> int:
        """Ranks that are used: one more than the highest."""
        return max(self.rank) + 1


def medusa(choices: Sequence[Sequence[int]]) -> Template:
    """The template of Medusa's choice lists: a node per list, which holds the ranks on its root path.

    Nodes stand in the order given. Source: Medusa, arXiv 2401.10774 (`medusa_choices`).

    Raises:
        ValueError: for a path that is empty, comes twice, or stands before its prefix.
    """
    index: dict[tuple[int, ...], int] = {(): 0}
    for choice in choices:
        path = tuple(choice)
        if not path or path in index or path[:-1] not in index:
            raise ValueError(f"choices: got {path}, takes each path once, none empty, and its prefix before it")
        index[path] = len(index)
    paths = list(index)[1:]
    return Template((-1, *(index[path[:-1]] for path in paths)), (0, *(path[-1] for path in paths)))


def likeliest(rates: Sequence[float], nodes: int, max_depth: int) -> Template:
    """The `nodes` likeliest nodes, likeliest first; fewer if the depth allows no more.

    A node of rank r is accepted with chance rates[r] once its parent is; rates descend. So every prefix of the template
    is the likeliest tree of its size too. Ties go to the node found first.
    """
    parents, ranks = [], []
    heap = [(-1.0, 0, -1, 0, 0)]
    found = 1
    while heap and len(parents) < nodes:
        chance, _, parent, rank, depth = heapq.heappop(heap)
        here = len(parents)
        parents.append(parent)
        ranks.append(rank)
        if depth < max_depth:
            heapq.heappush(heap, (chance * rates[0], found, here, 0, depth + 1))
            found += 1
        if parent >= 0 and rank + 1 < len(rates):
            heapq.heappush(heap, (chance / rates[rank] * rates[rank + 1], found, parent, rank + 1, depth))
            found += 1
    return Template(tuple(parents), tuple(ranks))


def place(template: Template, anchor: Int[Array, ""], ids: Int[Array, "d k"], chance: Float[Array, "#d k"]) -> Draft:
    """The template filled with each depth's ranked tokens, as Medusa's heads give them.

    A node at depth d of rank r holds ids[d - 1, r] and is accepted with chance[d - 1, r] once its parent is (one row:
    the same at all depths). The tokens are those of the template; their order is by the product of chances, so that
    every prefix is the best draft of its size. A token below 0 is none: its node and all below it are left out.

    Raises:
        ValueError: for fewer depths or ranks than the template has.
    """
    return place_below(template, anchor, lambda tokens, depth: ids[depth][None], jnp.broadcast_to(chance, ids.shape))


def place_below(
    template: Template,
    anchor: Int[Array, ""],
    following: Callable[[Int[Array, "w"], int], Int[Array, "#w k"]],
    chance: Float[Array, "d k"],
) -> Draft:
    """As `place`, with tokens that depend on the parent's: following(tokens at depth d, d) gives their successors.

    It is called once per depth: a table of successors (Token Recycling), or a head that has seen the path's last token.
    """
    if chance.shape[0] < template.depth:
        raise ValueError(f"ids: got {chance.shape[0]} depths, takes as many as the template has, {template.depth}")
    parent, rank, level = (np.asarray(x) for x in (template.parent, template.rank, template.depths))
    tokens = jnp.zeros(template.nodes, jnp.int32).at[0].set(anchor)
    log_chance = jnp.zeros(template.nodes)
    for depth in range(template.depth):
        here = np.flatnonzero(level == depth + 1)
        above, row = np.unique(parent[here], return_inverse=True)
        ids = following(tokens[above], depth)
        ranks = min(ids.shape[-1], chance.shape[-1])
        if ranks < template.width:
            raise ValueError(f"ids: got {ranks} ranks, takes as many as the template has, {template.width}")
        ids = jnp.broadcast_to(ids, (len(above), ids.shape[-1]))[row, rank[here]]
        known = (tokens[parent[here]] >= 0) & (ids >= 0)
        gained = jnp.log(jnp.clip(chance[depth, rank[here]], LEAST, 1.0))
        tokens = tokens.at[here].set(jnp.where(known, ids, -1))
        log_chance = log_chance.at[here].set(jnp.where(known, log_chance[parent[here]] + gained, -jnp.inf))
    return best(Pool(tokens[1:], jnp.asarray(parent[1:] - 1, jnp.int32), log_chance[1:]), anchor, template.nodes)
