"""Drawn trees grown with an expander: every node has drawn children, as many as its depth says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from spec_jax.topology.expander import Expander
from spec_jax.topology.sampled import Siblings
from spec_jax.tree import Draft, Law, Tree


@dataclasses.dataclass(frozen=True)
class Branching:
    """Every node at depth d has widths[d] children, drawn from the drafter's law; 1 + w0 + w0 w1 + .. nodes.

    Without replacement: RSD-C, constant branching (arXiv 2402.14160). With it: MCSD, SpecInfer's expansion widths, and
    SpecTr's k continuations, (k, 1, 1, ..). widths (1, 1, ..) is the chain of speculative sampling. As
    `sampled.branching`, with a model's logits behind every node.
    """

    widths: tuple[int, ...]
    replacement: bool = False

    def __post_init__(self) -> None:
        """Check the widths."""
        if not self.widths or not all(isinstance(w, int) and w >= 1 for w in self.widths):
            raise ValueError(f"widths: got {self.widths}, takes at least one, each an integer of at least 1")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Nodes at each depth, the root's 1 first."""
        return tuple(math.prod(self.widths[:d]) for d in range(len(self.widths) + 1))

    @property
    def nodes(self) -> int:
        """Nodes of a draft, the root among them."""
        return sum(self.sizes)

    @property
    def depth(self) -> int:
        """Longest root path."""
        return len(self.widths)

    @property
    def width(self) -> int:
        """Most nodes expanded at once."""
        return max(self.sizes[:-1])

    @property
    def expanded(self) -> int:
        """Numbers of expanded nodes: the root's, and `width` per depth but the last."""
        return 1 + (self.depth - 1) * self.width


Draw = Callable[
    [Float[Array, "b k vocab"], Int[Array, "b k d"], Int[Array, ""], Int[Array, "k"]], tuple[Siblings, Array]
]
"""(logits behind k nodes, their root paths, their depth, index of each one's first draw) -> siblings, their laws."""


def branch(
    shape: Branching,
    expander: Expander,
    params: Any,
    pool: Any,
    anchor: Int[Array, "b"],
    logits: Float[Array, "b vocab"],
    draw: Draw,
) -> tuple[Draft, np.ndarray, Any]:
    """A drawn tree in every row, level by level; the expander's number of each node (-1: none), and its pool.

    Arguments as for `growth.grow`; `draw` gives max(widths) siblings a node, of which the first ones are used.
    """
    b, vocab = logits.shape
    sizes, d_max, w = shape.sizes, shape.depth, shape.width
    most, room = max(shape.widths), max(sizes)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    at = [np.arange(n) for n in sizes[1:]]
    pad = lambda rows: jnp.asarray(np.stack([np.pad(r, (0, room - len(r))) for r in rows]), jnp.int32)  # noqa: E731
    slots = [i // k for i, k in zip(at, shape.widths, strict=True)]
    above = pad(slots)
    pick = pad([i // k * most + i % k for i, k in zip(at, shape.widths, strict=True)])
    first = pad([starts[d + 1] + np.arange(sizes[d]) * k for d, k in enumerate(shape.widths)])

    def offer(carry, logits: Array, depth: Array, width: int):
        paths, found, laws = carry
        drawn, law = draw(logits, paths[:, :width], depth, first[depth, :width])
        choose = lambda x: jnp.take(x.reshape(b, -1), pick[depth], axis=1)  # noqa: E731
        drawn = jax.tree.map(choose, drawn)
        paths = jnp.take(paths, above[depth], axis=1).at[:, :, depth].set(drawn.tokens)
        found = jax.tree.map(lambda to, x: to.at[:, depth].set(x), found, drawn)
        return paths, found, lax.dynamic_update_slice(laws, law[:, None], (0, depth, 0, 0))

    def level(depth: Array, carry):
        pool, (paths, *rest) = carry
        token = jnp.take(paths[:, :w], depth - 1, axis=2)
        parent = jnp.where(depth == 1, 0, 1 + (depth - 2) * w + above[depth - 1, :w])
        pool, logits = expander.expand(params, pool, jnp.broadcast_to(parent, token.shape), token)
        return pool, offer((paths, *rest), logits, depth, w)

    none = Siblings(*(jnp.zeros((b, d_max, room), t) for t in (jnp.int32, bool, jnp.float32)))
    paths = jnp.zeros((b, room, d_max), jnp.int32)
    carry = (paths, none, jnp.zeros((b, d_max, w, vocab)))
    carry = (pool, offer(carry, logits[:, None], jnp.int32(0), 1))
    pool, (_, found, laws) = lax.fori_loop(1, d_max, level, carry) if d_max > 1 else carry
    tokens, valid, confidence = (
        jnp.concatenate([x[:, d, : sizes[d + 1]] for d in range(d_max)], axis=1)
        for x in (found.tokens, found.valid, found.confidence)
    )
    parent = np.concatenate([[-1], *(starts[d] + slot for d, slot in enumerate(slots))])
    root = lambda x, value: jnp.pad(x, ((0, 0), (1, 0)), constant_values=value)  # noqa: E731
    valid = _closed(root(valid, True), parent)
    rows = [laws[:, d, slot] for d, slot in enumerate(slots)]
    tree = Tree(
        tokens=jnp.where(valid, root(tokens, 0), 0).at[:, 0].set(anchor),
        parent=jnp.broadcast_to(jnp.asarray(parent, jnp.int32), valid.shape),
        valid=valid,
    )
    proposal = "sampled" if shape.replacement else "without_replacement"
    numbers = [np.array([0]), *(1 + (d - 1) * w + np.arange(sizes[d]) for d in range(1, d_max)), np.full(sizes[-1], -1)]
    draft = Draft(
        tree,
        jnp.where(valid, root(confidence, 1.0), 0.0),
        Law(jnp.concatenate([jnp.zeros((b, 1, vocab)), *rows], axis=1)),
        proposal,
    )
    return draft, np.concatenate(numbers), pool


def _closed(valid: Array, parent: np.ndarray) -> Array:
    """Nodes that are valid with all their ancestors; parents stand before children."""
    columns = [valid[:, 0]]
    for i, p in enumerate(parent[1:], 1):
        columns.append(valid[:, i] & columns[p])
    return jnp.stack(columns, axis=1)
