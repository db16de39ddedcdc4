"""Token Recycling: trees from the top tokens of logits that were computed anyway (arXiv 2408.08696)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from spec_jax.checks import check_sizes
from spec_jax.drafters.checks import check_rates
from spec_jax.drafters.drafter import Committed, Context
from spec_jax.drafters.writers import hashed, winners
from spec_jax.models.target import Output
from spec_jax.sampling.reduce import top_tokens
from spec_jax.topology.static import Template, likeliest
from spec_jax.tree import Draft, Tree

_ON_PATH = 1 << 30


@flax.struct.dataclass
class Adjacency:
    """After each token, the likeliest next ones when it was last scored, likeliest first; -1 if it never was."""

    successors: Int[Array, "vocab k"]


@dataclasses.dataclass(frozen=True)
class Recycling:
    """Drafts a tree of a fixed shape: a node's r-th child is the r-th successor of the node's token.

    Every node that the target scores, accepted or not, renews its token's successors; prefill renews none. The table
    is shared by all rows and stays when rows go. The shape is the likeliest tree of its size, and so is every prefix
    of it, if a node of rank r is accepted with chance rates[r] once its parent is.

    Attributes:
        vocab_size: the target's number of token ids.
        nodes: nodes of a draft, the anchor among them.
        rates: for each rank, the chance that a node is accepted if its parent is, descending; their number is that of
            the successors kept. The default is what SmolLM2's own answers showed where the anchor had been scored
            before.
        max_depth: longest root path, which is also the number of look-ups one after another.
    """

    vocab_size: int
    nodes: int = 32
    rates: tuple[float, ...] = (0.55, 0.10, 0.05, 0.03, 0.02, 0.02, 0.01, 0.01)
    max_depth: int = 6

    def __post_init__(self) -> None:
        """Check the settings."""
        check_sizes(self, vocab_size=1, nodes=2, max_depth=1)
        check_rates(self.rates, self.vocab_size)
        if self.template.nodes < self.nodes:
            what = f"as many as {len(self.rates)} successors give down to depth {self.max_depth}"
            raise ValueError(f"nodes: got {self.nodes}, takes at most {self.template.nodes}, {what}")

    @functools.cached_property
    def template(self) -> Template:
        """The fixed shape."""
        return likeliest(self.rates, self.nodes, self.max_depth)

    @property
    def depth(self) -> int:
        """Depth of the fixed shape."""
        return self.template.depth

    def init(self, params: Any, batch: int, max_len: int) -> Adjacency:
        """No token scored yet."""
        return Adjacency(jnp.full((self.vocab_size, len(self.rates)), -1, jnp.int32))

    def tap(self, output: Output) -> Int[Array, "b n k"]:
        """Each scored node's likeliest next tokens."""
        return top_tokens(output.logits, len(self.rates))

    def observe(self, params: Any, state: Adjacency, committed: Committed) -> Adjacency:
        """The table renewed by the nodes scored in this round.

        Of several nodes with one token, one on an accepted path wins over a rejected one, and then the one whose
        successors hash higher: the rows' order plays no part.
        """
        if committed.tree is None:
            return state
        tree, found = committed.tree, committed.taps
        b, n = tree.tokens.shape
        k = found.shape[-1]
        scored = (tree.valid & (committed.length > 0)[:, None]).reshape(-1)
        token = jnp.where(scored, tree.tokens.reshape(-1), self.vocab_size)
        priority = hashed(found).reshape(-1) + committed.walked(n).reshape(-1) * _ON_PATH
        slot = winners(token, self.vocab_size, priority)
        return Adjacency(state.successors.at[slot].set(found.reshape(b * n, k), mode="drop"))

    def propose(self, params: Any, state: Adjacency, context: Context) -> tuple[Draft, Adjacency]:
        """The tree; nodes whose token is not known, or that could not be emitted, are invalid."""
        shape, batch = self.template, context.tokens.shape[0]
        parent, rank, depths = (np.asarray(x) for x in (shape.parent, shape.rank, shape.depths))
        tokens = jnp.full((batch, self.nodes), -1, jnp.int32).at[:, 0].set(context.anchor)
        for level in range(1, self.depth + 1):
            here = np.flatnonzero(depths == level)
            above = tokens[:, parent[here]]
            successors = state.successors[jnp.maximum(above, 0), rank[here]]
            tokens = tokens.at[:, here].set(jnp.where(above >= 0, successors, -1))
        useful = (jnp.asarray(depths) < context.room[:, None]) & context.active[:, None]
        valid = (useful & (tokens >= 0)).at[:, 0].set(True)
        tree = Tree(
            tokens=jnp.where(valid, tokens, 0).at[:, 0].set(context.anchor),
            parent=jnp.broadcast_to(jnp.asarray(parent, jnp.int32), (batch, self.nodes)),
            valid=valid,
        )
        confidence = jnp.asarray(self.rates, jnp.float32)[rank].at[0].set(1.0)
        return Draft(tree, jnp.broadcast_to(confidence, (batch, self.nodes))), state

    def insert(self, state: Adjacency, rows: Int[Array, "r"], other: Adjacency) -> Adjacency:
        """The table is the batch's; that of the other state is left behind."""
        return state

    def release(self, state: Adjacency, rows: Int[Array, "r"], tokens: Array, length: Array) -> Adjacency:
        """The table stays."""
        return state
