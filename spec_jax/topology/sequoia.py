"""Sequoia's dynamic programme: the static tree with the most expected tokens for a rank-acceptance vector."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from spec_jax.topology.static import Template


def sequoia(
    rates: Sequence[float], nodes: int, max_depth: int | None = None, gaps: bool = False
) -> tuple[Template, float]:
    """The template of `nodes` nodes with the most expected tokens per round, and that expectation (bonus included).

    A node of rank r is accepted with chance rates[r] once its parent is, so the expectation is the sum of the products
    of rates on all root paths: c(1) = 1, c(n) = 1 + max over sizes that add up to n - 1 of sum_r rates[r] c(n_r).
    Exact for rates in any order. A node's children have the ranks 0, 1, .. without a gap, as children that are drawn
    one after another must; gaps=True drops this for tokens that were ranked by a score, whose rank may be left out.

    Nodes stand in descending order of chance, as far as parents and elder siblings, which come first, allow; for
    descending rates every prefix is then the best of its size.

    Source: Sequoia, arXiv 2402.12374.

    Raises:
        ValueError: for rates outside [0, 1], or more nodes than ranks and depth allow.
    """
    p = np.asarray(rates, float)
    if p.ndim != 1 or not p.size or not ((p >= 0) & (p <= 1)).all():
        raise ValueError(f"rates: got {rates}, takes numbers in [0, 1], at least one")
    if nodes < 1 or (max_depth is not None and max_depth < 0):
        raise ValueError(f"nodes: got {nodes} down to depth {max_depth}, takes at least 1 down to a depth of 0 or more")
    levels = []
    if max_depth is None:
        levels = [_level(p, nodes, None, gaps)]
    else:
        below = np.full(nodes + 1, -np.inf)
        below[1] = 1.0
        for _ in range(min(max_depth, nodes - 1)):
            levels.append(_level(p, nodes, below, gaps))
            below = levels[-1][0]
    sizes = levels[-1][0] if levels else np.array([-np.inf, 1.0])
    if nodes >= len(sizes) or sizes[nodes] == -np.inf:
        room = max(n for n in range(1, len(sizes)) if sizes[n] > -np.inf)
        raise ValueError(
            f"nodes: got {nodes}, takes at most {room}, as many as {p.size} ranks give down to depth {max_depth}"
        )
    return _ordered(_grow(levels, nodes, max_depth is None), p), float(sizes[nodes])


def _level(p: np.ndarray, nodes: int, below: np.ndarray | None, gaps: bool) -> tuple[np.ndarray, np.ndarray]:
    """Best expectations c[n] of trees of n nodes, and the size of the child of rank r when m nodes are left for r ..

    `below` are those of the children's trees; None: the same as these (no limit to the depth).
    """
    ranks = p.size
    c = np.full(nodes + 1, -np.inf)
    rest = np.full((ranks + 1, nodes), -np.inf)
    rest[:, 0] = 0.0
    size = np.zeros((ranks, nodes), int)
    c[1] = 1.0
    under = c if below is None else below
    for m in range(1, nodes):
        for r in range(ranks - 1, -1, -1):
            value = p[r] * np.where(under[1 : m + 1] > -np.inf, under[1 : m + 1], 0.0) + rest[r + 1, m - 1 :: -1][:m]
            value = np.where(under[1 : m + 1] > -np.inf, value, -np.inf)
            at = int(np.argmax(value))
            rest[r, m], size[r, m] = value[at], at + 1
            if gaps and rest[r + 1, m] >= rest[r, m]:
                rest[r, m], size[r, m] = rest[r + 1, m], 0
        c[m + 1] = 1.0 + rest[0, m]
    return c, size


def _grow(levels: list[tuple[np.ndarray, np.ndarray]], nodes: int, unlimited: bool) -> list[tuple[int, int]]:
    """(parent, rank) of every node of the best tree, parents and elder siblings first."""
    tree, waiting = [(-1, 0)], [(0, nodes, len(levels) - 1)]
    while waiting:
        node, left, level = waiting.pop()
        left -= 1
        for rank in range(levels[level][1].shape[0] if level >= 0 else 0):
            if left == 0:
                break
            size = int(levels[level][1][rank, left])
            if size:
                tree.append((node, rank))
                waiting.append((len(tree) - 1, size, level if unlimited else level - 1))
                left -= size
    return tree


def _ordered(tree: list[tuple[int, int]], p: np.ndarray) -> Template:
    """The tree with its nodes by descending chance, each behind its parent and its elder siblings."""
    chance, children = [1.0], {0: []}
    for node, (parent, rank) in enumerate(tree[1:], 1):
        chance.append(chance[parent] * p[rank])
        children[node] = []
        children[parent].append(node)
    heap, place, ranks, parents = [(-1.0, 0)], {-1: -1}, [], []
    while heap:
        _, node = heapq.heappop(heap)
        parent, rank = tree[node]
        place[node] = len(parents)
        parents.append(place[parent])
        ranks.append(rank)
        siblings = children.get(parent, [node])
        for free in (*children[node][:1], *siblings[siblings.index(node) + 1 :][:1]):
            heapq.heappush(heap, (-chance[free], free))
    return Template(tuple(parents), tuple(ranks))
