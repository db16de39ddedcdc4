"""A model as the drafter of trees: a separate small one, or a view of the target's own parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from spec_jax.drafters import growing
from spec_jax.drafters.drafter import Committed, Context
from spec_jax.models.target import Output, Target
from spec_jax.topology.branching import Branching
from spec_jax.topology.coupling import Candidates, Fit, Learner
from spec_jax.topology.growth import Growth
from spec_jax.tree import Draft, Tree


@flax.struct.dataclass
class Staged:
    """The expanded nodes of a draft as a tree that the model scores piece by piece: slot 0 first, `count` so far."""

    tokens: Int[Array, "b s"]
    parent: Int[Array, "b s"]
    rows: Any
    count: Int[Array, ""]


@flax.struct.dataclass
class ModelTreeState:
    """The model's state, and what the draft that is being verified left pending.

    The model's state holds the committed text without the anchor; where `behind` is 1 also without the token before
    it, `last`: an accepted leaf that was never expanded, which the next draft scores beside its root. slot is each
    draft node's place among the staged rows, -1 for nodes that were not expanded. seen are the candidates of the
    expanded nodes and fit what was learned from earlier ones; None without coupling.
    """

    model: Any
    behind: Int[Array, "b"]
    last: Int[Array, "b"]
    slot: Int[Array, "b n"]
    staged: Staged
    seen: Candidates | None
    fit: Fit | None


@dataclasses.dataclass(frozen=True)
class ModelExpander:
    """A target as an `Expander`; params are (its parameters, its state, the root's slot in each row)."""

    model: Target

    def expand(
        self, params: Any, pool: Staged, parent: Int[Array, "b k"], token: Int[Array, "b k"]
    ) -> tuple[Staged, Float[Array, "b k vocab"]]:
        """Score the new nodes over the state and their ancestors' staged rows."""
        weights, state, root = params
        slot = jnp.where(parent == 0, root[:, None], parent + 1)
        put = lambda to, x: lax.dynamic_update_slice_in_dim(to, x, pool.count, axis=1)  # noqa: E731
        tokens, above = put(pool.tokens, token), put(pool.parent, slot)
        tree = Tree(tokens, above, jnp.ones(tokens.shape, bool))
        output, rows, _ = self.model.score(weights, state, tree, pool.rows, (pool.count, token.shape[1]))
        return Staged(tokens, above, rows, pool.count + token.shape[1]), output.logits


@dataclasses.dataclass(frozen=True)
class ModelTree(growing.Shaped):
    """Drafts trees with another model of the same vocabulary, or with a view of the target (`models.views`).

    A `Growth` keeps the likeliest nodes; coupled ones rank by the target's noise too, with weights that `learner` fits
    while decoding, and any of them is verified by `match`. A `Branching` draws its nodes, for the rules of that kind.

    Every level of a draft is one pass of the model over the nodes that are expanded there; its leaves are not scored.
    max_len and block fix the state's size and must be at least the engine's.

    Attributes:
        model: the model; its parameters are the drafter's.
        shape: the trees.
        learner: how weights are fitted, for a coupled shape.
        block: tokens of a prefill chunk.
    """

    model: Target
    shape: Growth | Branching
    learner: Learner = Learner()
    block: int = 64

    keeps_draft = True

    @property
    def vocab_size(self) -> int:
        """That of the model."""
        return self.model.vocab_size

    def init(self, params: Any, batch: int, max_len: int) -> ModelTreeState:
        """Empty rows."""
        model = self.model.init_state(params, batch, max_len + max(self.block, self.depth + 2))
        zeros = lambda *shape: jnp.zeros((batch, *shape), jnp.int32)  # noqa: E731
        slots, (seen, fit) = self.shape.expanded + 1, growing.blank(self.shape, self.learner, batch, self.vocab_size)
        tree = Tree(zeros(slots), zeros(slots).at[:, 0].set(-1), jnp.ones((batch, slots), bool))
        rows = jax.eval_shape(lambda p, s: self.model.score(p, s, tree)[1], params, model)
        rows = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rows)
        return ModelTreeState(
            model=model,
            behind=zeros(),
            last=zeros(),
            slot=zeros(self.nodes) - 1,
            staged=Staged(tree.tokens, tree.parent, rows, jnp.int32(2)),
            seen=seen,
            fit=fit,
        )

    def tap(self, output: Output) -> None:
        """The target's outputs are not needed."""

    def observe(self, params: Any, state: ModelTreeState, committed: Committed) -> ModelTreeState:
        """Prefill a chunk (before the first draft), or commit the accepted path and learn from the target's choices."""
        if committed.tree is None:
            _, model = self.model.prefill(params, state.model, committed.tokens, committed.length)
            return dataclasses.replace(state, model=model)
        c, n = committed, committed.length[:, None]
        at = jnp.arange(c.path.shape[1])
        slot = jnp.where(at < n, jnp.take_along_axis(state.slot, c.path, axis=1), -1)
        number = jnp.where((at > 0) | (slot < 0), jnp.maximum(slot, 0) - 1, 0)
        end = jnp.maximum(n - 1, 0)
        leaf = (jnp.take_along_axis(slot, end, axis=1)[:, 0] < 0).astype(jnp.int32)
        last = jnp.take_along_axis(c.tokens, end, axis=1)[:, 0]
        moved = c.length > 0
        path = jnp.pad(jnp.maximum(slot, 0), ((0, 0), (0, 1)))
        path = jnp.where(state.behind[:, None] > 0, jnp.roll(path, 1, axis=1).at[:, 0].set(0), path)
        length = jnp.where(moved, state.behind + c.length - leaf, 0)
        return dataclasses.replace(
            state,
            model=self.model.commit(state.model, state.staged.rows, path, length),
            behind=jnp.where(moved, leaf, state.behind),
            last=jnp.where(moved, last, state.last),
            fit=growing.learn(self.learner, state.fit, state.seen, c, number),
        )

    def propose(self, params: Any, state: ModelTreeState, context: Context) -> tuple[Draft, ModelTreeState]:
        """The tree, and the state with the rows of its expanded nodes staged."""
        old, anchor, behind = state.staged, context.anchor, state.behind[:, None]
        tokens = old.tokens.at[:, 0].set(jnp.where(behind[:, 0] > 0, state.last, anchor)).at[:, 1].set(anchor)
        parent = old.parent.at[:, 0].set(-1).at[:, 1].set(0)
        tree = Tree(tokens, parent, jnp.ones(tokens.shape, bool))
        output, rows, model = self.model.score(params, state.model, tree, old.rows, (0, 2))
        pool = Staged(tokens, parent, rows, jnp.int32(2))
        logits = jnp.take_along_axis(output.logits, behind[:, :, None], axis=1)[:, 0]
        expander, weights = ModelExpander(self.model), (params, model, state.behind)
        draft, number, seen, staged = growing.draft(
            self.shape, self.learner, expander, weights, pool, logits, state.fit, context
        )
        slot = jnp.where(number > 0, number + 1, jnp.where(number == 0, behind, -1))
        return draft, dataclasses.replace(state, model=model, slot=slot, staged=staged, seen=seen)

    def insert(self, state: ModelTreeState, rows: Int[Array, "r"], other: ModelTreeState) -> ModelTreeState:
        """Rows replaced; what was learned is the batch's, and that of the other state is left behind."""
        put = lambda x, y: x.at[rows].set(y, mode="drop")  # noqa: E731
        return dataclasses.replace(
            state,
            model=self.model.insert(state.model, rows, self.model.materialize(other.model)),
            behind=put(state.behind, other.behind),
            last=put(state.last, other.last),
        )

    def release(self, state: ModelTreeState, rows: Array, tokens: Array, length: Array) -> ModelTreeState:
        """Rows emptied; what was learned stays."""
        model = self.model.release(state.model, rows)
        return dataclasses.replace(state, model=model, behind=state.behind.at[rows].set(0, mode="drop"))
