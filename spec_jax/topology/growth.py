"""Frontier growth: a tree grown level by level, of which the likeliest nodes are kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from spec_jax.checks import check_sizes
from spec_jax.topology.expander import Expander
from spec_jax.topology.pool import Pool, best, order
from spec_jax.tree import Draft


@dataclasses.dataclass(frozen=True)
class Growth:
    """How a tree is grown: which nodes are expanded, and which are kept.

    Each level expands its `width` likeliest nodes, and each expanded node offers its `children` likeliest tokens. All
    that was offered is pooled, and the likeliest nodes of the pool become the draft.

    Published trees are settings. EAGLE-2 (arXiv 2406.16858) and DominoTree's depth-synchronous form: width = children.
    PCTree: a beam of 4. DARTree "pruned": a beam of 12; "fixed": spare=False and nodes = 1 + depth * width. OPT-Tree
    (arXiv 2406.17276): width = nodes - 1, stopped by `delta`. DDTree: the same width, with `ContextFree` logits (see
    also `marginals.best_first`). Chains: width = children = 1.

    Attributes:
        nodes: nodes of the draft, the root among them.
        depth: longest root path, and so the number of expansions one after another.
        width: nodes expanded per level.
        children: tokens that each of them offers.
        candidates: tokens that a node's chances are shared out among; the best `children` of them are offered.
        ranking: "point" ranks by the drafter's law; "coupled" by law and noise together (see `coupling`).
        delta: stop once a level adds no more than this to the expected number of accepted nodes. At 0 nothing is lost:
            the levels below could not have added anything either.
        spare: whether nodes that were offered but not expanded may be kept.
    """

    nodes: int
    depth: int
    width: int
    children: int
    candidates: int = 64
    ranking: Literal["point", "coupled"] = "point"
    delta: float = 0.0
    spare: bool = True

    def __post_init__(self) -> None:
        """Check the settings."""
        check_sizes(self, nodes=1, depth=1, width=1, children=1, candidates=self.children)
        if self.ranking not in ("point", "coupled"):
            raise ValueError(f"ranking: got {self.ranking!r}, takes 'point' or 'coupled'")
        if not self.delta >= 0:
            raise ValueError(f"delta: got {self.delta!r}, takes a number of at least 0")

    @property
    def expanded(self) -> int:
        """Nodes that are expanded at most: the root, and `width` per level but the last."""
        return 1 + (self.depth - 1) * self.width


@flax.struct.dataclass
class Ranked:
    """The candidates behind k nodes: tokens, and the log-chance of each given that its node is right (-inf: none).

    trace is kept for every expanded node: what its drafter learns from once the verdict is in.
    """

    tokens: Int[Array, "*b m"]
    log_chance: Float[Array, "*b m"]
    trace: Any = None


Rank = Callable[[Float[Array, "b k vocab"], Int[Array, "b k d"], Int[Array, ""]], Ranked]
"""(logits behind k nodes, the tokens on their root paths without the root's, their depth) -> their candidates."""


@flax.struct.dataclass
class Grown:
    """A grown batch of drafts.

    expanded[i] is the number under which the expander knows draft node i, -1 if it was not expanded; trace holds the
    traces of all expanded nodes under those numbers.
    """

    draft: Draft
    expanded: Int[Array, "b n"]
    trace: Any
    pool: Any


@flax.struct.dataclass
class _Frontier:
    """The nodes expanded next: pool index, log-chance (-inf: none), number of the parent's expansion, root path."""

    index: Int[Array, "*b w"]
    log_chance: Float[Array, "*b w"]
    parent: Int[Array, "*b w"]
    paths: Int[Array, "*b w d"]


@flax.struct.dataclass
class _Carry:
    depth: Int[Array, ""]
    nodes: Pool
    number: Int[Array, "b p"]
    frontier: _Frontier
    trace: Any
    pool: Any
    alive: Bool[Array, "b"]
    value: Float[Array, "b"]


def grow(
    growth: Growth,
    expander: Expander,
    params: Any,
    pool: Any,
    anchor: Int[Array, "b"],
    logits: Float[Array, "b vocab"],
    rank: Rank,
    active: Bool[Array, "b"] | None = None,
) -> Grown:
    """Grow a tree in every row. A row's tree does not depend on the other rows; it ends when no active row gains.

    Args:
        growth: the settings.
        expander: gives the logits behind new nodes.
        params: the expander's parameters.
        pool: the expander's scratch, which holds the root and has room for `growth.expanded` nodes.
        anchor: each row's last committed token, the root.
        logits: what the expander says behind the root.
        rank: turns logits into candidates.
        active: rows whose draft is wanted; all if None. The others may get a shorter one.
    """
    g, b = growth, anchor.shape[0]
    per_level = g.width * g.children
    root = _Frontier(
        index=jnp.full((b, g.width), -1),
        log_chance=jnp.full((b, g.width), -jnp.inf).at[:, 0].set(0.0),
        parent=jnp.full((b, g.width), -1),
        paths=jnp.zeros((b, g.width, g.depth), jnp.int32),
    )
    size = g.depth * per_level
    zeros = jnp.zeros((b, size), jnp.int32)
    ranked = rank(logits[:, None], root.paths[:, :1], jnp.int32(0))
    if ranked.tokens.shape[-1] < g.children:
        m = ranked.tokens.shape[-1]
        raise ValueError(f"children: got {g.children}, takes at most the number of candidates {m}")
    trace = jax.tree.map(lambda x: jnp.zeros((b, g.expanded, *x.shape[2:]), x.dtype), ranked.trace)
    carry = _Carry(
        depth=jnp.int32(0),
        nodes=Pool(zeros, zeros - 1, jnp.full(zeros.shape, -jnp.inf)),
        number=zeros - 1,
        frontier=root,
        trace=trace,
        pool=pool,
        alive=jnp.ones(b, bool) if active is None else active,
        value=jnp.zeros(b),
    )
    fill = lambda x: jnp.pad(x, [(0, 0), (0, g.width - 1)] + [(0, 0)] * (x.ndim - 2))  # noqa: E731
    only = dataclasses.replace(ranked, tokens=fill(ranked.tokens), log_chance=fill(ranked.log_chance))
    carry = _offer(g, carry, only, jnp.zeros(1, jnp.int32))

    def level(carry: _Carry) -> _Carry:
        here, d = carry.frontier, carry.depth
        token = jnp.take_along_axis(here.paths, (d - 1)[None, None, None], axis=2)[:, :, 0]
        pool, logits = expander.expand(params, carry.pool, here.parent, token)
        number = 1 + (d - 1) * g.width + jnp.arange(g.width)
        return _offer(g, dataclasses.replace(carry, pool=pool), rank(logits, here.paths, d), number)

    if g.depth > 1:
        carry = lax.while_loop(lambda c: (c.depth < g.depth) & c.alive.any(), level, carry)
    draft = jax.vmap(lambda nodes, anchor: best(nodes, anchor, g.nodes))(carry.nodes, anchor)
    index = jax.vmap(lambda nodes: order(nodes, g.nodes))(carry.nodes)
    number = jax.vmap(lambda number, at: jnp.where(at < 0, -1, number[at]))(carry.number, index)
    return Grown(dataclasses.replace(draft, proposal=g.ranking), number.at[:, 0].set(0), carry.trace, carry.pool)


def _offer(g: Growth, carry: _Carry, ranked: Ranked, number: Int[Array, "k"]) -> _Carry:
    """Pool the children of the frontier, which was expanded under the given numbers, and choose the next frontier."""
    put = lambda to, x: lax.dynamic_update_slice_in_dim(to, x.astype(to.dtype), number[0], axis=1)  # noqa: E731
    numbers = jnp.pad(number, (0, g.width - number.shape[0]))
    one = lambda *row: _offer_row(g, carry.depth, numbers, *row)  # noqa: E731
    nodes, numbered, frontier, value = jax.vmap(one)(
        carry.nodes, carry.number, carry.frontier, ranked.tokens, ranked.log_chance, carry.alive
    )
    return dataclasses.replace(
        carry,
        depth=carry.depth + 1,
        nodes=nodes,
        number=numbered,
        frontier=frontier,
        trace=jax.tree.map(put, carry.trace, ranked.trace),
        alive=carry.alive & (value - carry.value > g.delta),
        value=value,
    )


def _offer_row(
    g: Growth,
    depth: Int[Array, ""],
    numbers: Int[Array, "w"],
    nodes: Pool,
    number: Int[Array, "p"],
    here: _Frontier,
    tokens: Int[Array, "w m"],
    step: Float[Array, "w m"],
    alive: Bool[Array, ""],
) -> tuple[Pool, Int[Array, "p"], _Frontier, Float[Array, ""]]:
    """One row of `_offer`, and the expected number of accepted nodes of the best draft so far."""
    size = number.shape[0]
    number = number.at[jnp.where(here.index < 0, size, here.index)].set(numbers, mode="drop")
    step, pick = lax.top_k(jnp.where(step > -jnp.inf, jnp.minimum(step, 0.0), -jnp.inf), g.children)
    tokens = jnp.take_along_axis(tokens, pick, axis=1)
    chance = jnp.where(alive, here.log_chance[:, None] + step, -jnp.inf)
    offered, flat = depth * g.width * g.children, lambda x: jnp.broadcast_to(x, tokens.shape).reshape(-1)
    top, at = lax.top_k(flat(chance), g.width)
    kept = flat(chance) if g.spare else jnp.full(chance.size, -jnp.inf).at[at].set(top)
    write = lambda to, x: lax.dynamic_update_slice_in_dim(to, x, offered, axis=0)  # noqa: E731
    nodes = Pool(
        write(nodes.tokens, flat(tokens)),
        write(nodes.parent, flat(here.index[:, None])),
        write(nodes.log_chance, kept),
    )
    paths = here.paths[at // g.children]
    frontier = _Frontier(
        index=offered + at,
        log_chance=top,
        parent=numbers[at // g.children],
        paths=paths.at[:, depth].set(flat(tokens)[at]),
    )
    value = jnp.exp(lax.top_k(nodes.log_chance, min(g.nodes - 1, nodes.log_chance.size))[0]).sum()
    return nodes, number, frontier, value
