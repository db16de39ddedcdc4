"""Draft heads that go on from the target's hidden states, token by token, and the trees that they grow.

A head pairs the hidden state at a position with the embedding of the next token. For committed tokens the state is the
target's; for drafted ones it is what the head itself put out at the token before. Its cache holds committed pairs only,
read with the target's states; what it computes for drafted tokens is scratch that ends with the draft.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from spec_jax.drafters import features, growing
from spec_jax.drafters.drafter import Committed, Context
from spec_jax.models.target import Output
from spec_jax.topology.branching import Branching
from spec_jax.topology.coupling import Candidates, Fit, Learner
from spec_jax.topology.growth import Growth
from spec_jax.tree import Draft, Tree


@runtime_checkable
class Head(Protocol):
    """The network of a head (MTP, EAGLE). Static and hashable; its state holds the committed pairs."""

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        ...

    def init(self, params: Any, batch: int, max_len: int) -> tuple[Any, Float[Array, "b hidden"]]:
        """The state of no pairs, and a context of zeros."""
        ...

    def taken(self, features: Array) -> Array:
        """What it reads of the target's features [B, N, taps, hidden]."""
        ...

    def context(self, params: Any, taken: Array) -> Float[Array, "b n hidden"]:
        """Its input made of what was taken, of the kind that it puts out itself."""
        ...

    def score(
        self,
        params: Any,
        state: Any,
        context: Float[Array, "b n hidden"],
        tree: Tree,
        staged: Any = None,
        nodes: tuple[Int[Array, ""] | int, int] | None = None,
    ) -> tuple[Float[Array, "b n hidden"], Any]:
        """The context behind each pair of a tree of pairs, and staged rows; as `Target.score` otherwise.

        Several pairs may have parent -1: they stand next to each other behind the committed ones.
        """
        ...

    def logits(self, params: Any, context: Float[Array, "b n hidden"]) -> Float[Array, "b n vocab"]:
        """Logits behind contexts."""
        ...

    def commit(self, state: Any, staged: Any, length: Int[Array, "b"]) -> Any:
        """The first `length` pairs of a scored chain behind the committed ones."""
        ...

    def insert(self, state: Any, rows: Int[Array, "r"], other: Any) -> Any:
        """Rows replaced."""
        ...

    def release(self, state: Any, rows: Int[Array, "r"]) -> Any:
        """Rows emptied."""
        ...


@flax.struct.dataclass
class Scratch:
    """The expanded pairs of a draft, the root's left out: tokens, parents (-1: the root), contexts and staged rows."""

    tokens: Int[Array, "b s"]
    parent: Int[Array, "b s"]
    context: Float[Array, "b s hidden"]
    rows: Any
    count: Int[Array, ""]


@flax.struct.dataclass
class HeadState:
    """The head's state over committed pairs, and the context behind the last one; `known`: whether there is one.

    number, seen and fit are as in `ModelTreeState`: what a verdict is learned from.
    """

    head: Any
    context: Float[Array, "b hidden"]
    known: Bool[Array, "b"]
    number: Int[Array, "b n"]
    seen: Candidates | None
    fit: Fit | None


@dataclasses.dataclass(frozen=True)
class HeadExpander:
    """A head as an `Expander`; params are (its parameters, its state, the root's context)."""

    head: Head

    def expand(
        self, params: Any, pool: Scratch, parent: Int[Array, "b k"], token: Int[Array, "b k"]
    ) -> tuple[Scratch, Float[Array, "b k vocab"]]:
        """Pair the tokens with their parents' contexts."""
        weights, state, root = params
        own = jnp.take_along_axis(pool.context, jnp.maximum(parent - 1, 0)[:, :, None], axis=1)
        above = jnp.where(parent[:, :, None] == 0, root[:, None], own)
        put = lambda to, x: lax.dynamic_update_slice_in_dim(to, x, pool.count, axis=1)  # noqa: E731
        tokens, parents = put(pool.tokens, token), put(pool.parent, parent - 1)
        tree, k = Tree(tokens, parents, jnp.ones(tokens.shape, bool)), token.shape[1]
        context, rows = self.head.score(weights, state, above, tree, pool.rows, (pool.count, k))
        new = Scratch(tokens, parents, put(pool.context, context), rows, pool.count + k)
        return new, self.head.logits(weights, context)


@dataclasses.dataclass(frozen=True)
class HeadTree(growing.Shaped):
    """Drafts with a head that reads the target's features; the target has to return them (its `taps`).

    A `Growth` keeps the likeliest nodes, "point" or "coupled" (verify with `match`), a `Branching` draws them (verify
    with the rules of that kind); chains are width 1. After a verdict the head reads the committed tokens with the
    target's own states, and the last of these pairs gives the next draft's root, so a draft of depth d takes d passes.
    A text of one token has no pair yet and is not drafted for.

    Attributes:
        head: the network.
        shape: the trees.
        learner: how weights are fitted, for a coupled shape.
    """

    head: Head
    shape: Growth | Branching
    learner: Learner = Learner()

    @property
    def vocab_size(self) -> int:
        """That of the head."""
        return self.head.vocab_size

    def init(self, params: Any, batch: int, max_len: int) -> HeadState:
        """Empty rows."""
        head, context = self.head.init(params, batch, max_len)
        number = jnp.full((batch, self.nodes), -1, jnp.int32)
        seen, fit = growing.blank(self.shape, self.learner, batch, self.vocab_size)
        return HeadState(head, context, jnp.zeros(batch, bool), number, seen, fit)

    def tap(self, output: Output) -> Array:
        """What the head reads of the features. Raises ValueError where the target returns none."""
        return self.head.taken(features.required(output.features))

    def observe(self, params: Any, state: HeadState, committed: Committed) -> HeadState:
        """Read the committed tokens' pairs with the target's states, and learn from a verdict."""
        c, moved, fit = committed, committed.length > 0, state.fit
        if c.tree is not None:
            fit = growing.learn(self.learner, fit, state.seen, c, growing.on_path(state.number, c))
        pairs = _chain(features.following(c))
        inputs = self.head.context(params, features.along_path(c, self.head.taken))
        context, rows = self.head.score(params, state.head, inputs, pairs)
        last = jnp.maximum(c.length - 1, 0)[:, None, None]
        end = jnp.take_along_axis(context, last, axis=1)[:, 0]
        return dataclasses.replace(
            state,
            head=self.head.commit(state.head, rows, c.length),
            context=jnp.where(moved[:, None], end, state.context),
            known=state.known | moved,
            fit=fit,
        )

    def propose(self, params: Any, state: HeadState, context: Context) -> tuple[Draft, HeadState]:
        """The tree; nothing of it is left pending but what is learned from it."""
        batch, slots = context.tokens.shape[0], max(1, self.shape.expanded - 1)
        tree = _chain(jnp.zeros((batch, slots), jnp.int32))
        contexts = jnp.zeros((batch, slots, state.context.shape[1]), state.context.dtype)
        rows = jax.eval_shape(self.head.score, params, state.head, contexts, tree)[1]
        rows = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rows)
        pool = Scratch(tree.tokens, tree.parent, contexts, rows, jnp.int32(0))
        logits = self.head.logits(params, state.context[:, None])[:, 0]
        expander, weights = HeadExpander(self.head), (params, state.head, state.context)
        draft, number, seen, _ = growing.draft(
            self.shape, self.learner, expander, weights, pool, logits, state.fit, context
        )
        return proposed(state, draft, number, seen)

    def insert(self, state: HeadState, rows: Int[Array, "r"], other: HeadState) -> HeadState:
        """Rows replaced; what was learned is the batch's, and that of the other state is left behind."""
        put = lambda x, y: x.at[rows].set(y, mode="drop")  # noqa: E731
        return dataclasses.replace(
            state,
            head=self.head.insert(state.head, rows, other.head),
            context=put(state.context, other.context),
            known=put(state.known, other.known),
        )

    def release(self, state: HeadState, rows: Array, tokens: Array, length: Array) -> HeadState:
        """Rows emptied; what was learned stays."""
        known = state.known.at[rows].set(False, mode="drop")
        return dataclasses.replace(state, head=self.head.release(state.head, rows), known=known)


def proposed(
    state: HeadState, draft: Draft, number: Int[Array, "b n"], seen: Candidates | None
) -> tuple[Draft, HeadState]:
    """The draft without the nodes of rows that have no pair yet, and the state that remembers how it was made."""
    root = jnp.arange(draft.tree.valid.shape[1]) == 0
    valid = draft.tree.valid & (state.known[:, None] | root)
    draft = dataclasses.replace(draft, tree=dataclasses.replace(draft.tree, valid=valid))
    number = jnp.where(state.known[:, None], number, -1)
    return draft, dataclasses.replace(state, number=number, seen=seen)


def _chain(tokens: Int[Array, "b n"]) -> Tree:
    parent = jnp.broadcast_to(jnp.arange(-1, tokens.shape[1] - 1, dtype=jnp.int32), tokens.shape)
    return Tree(tokens, parent, jnp.ones(tokens.shape, bool))
