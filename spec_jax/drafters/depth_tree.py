"""Drafts by heads that read the target's hidden states once a round: Medusa's, Hydra's, and P-EAGLE's parallel pass."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax import tree as trees
from spec_jax.drafters import growing, ranking
from spec_jax.drafters.block.shape import BestFirst
from spec_jax.drafters.drafter import Committed, Context
from spec_jax.drafters.head_tree import Head, HeadState, HeadTree, proposed
from spec_jax.models.config import require
from spec_jax.models.target import Output
from spec_jax.sampling.reduce import argmax
from spec_jax.topology import static
from spec_jax.topology.branching import Branching
from spec_jax.topology.coupling import Fit, Learner
from spec_jax.topology.expander import ContextFree, Expander, Marginals
from spec_jax.topology.growth import Growth, Ranked
from spec_jax.topology.static import Template
from spec_jax.tree import Draft


@dataclasses.dataclass(frozen=True)
class Choices:
    """A static tree filled with every depth's ranked tokens: Medusa's choice lists (arXiv 2401.10774).

    Attributes:
        template: the shape, as `topology.static.medusa` reads it from choice lists.
        candidates: tokens that a depth's chances are shared out among when coupled.
        ranking: "point" ranks by the drafter's law; "coupled" by law and noise together (see `topology.coupling`).
    """

    template: Template
    candidates: int = 64
    ranking: Literal["point", "coupled"] = "point"

    def __post_init__(self) -> None:
        """Check the settings."""
        width, c = self.template.width, self.candidates
        fine = isinstance(c, int) and not isinstance(c, bool) and c >= width
        require(fine, "candidates", c, f"an integer of at least the template's width, {width}")
        require(self.ranking in ("point", "coupled"), "ranking", self.ranking, "point or coupled")

    @property
    def nodes(self) -> int:
        """The template's."""
        return self.template.nodes

    @property
    def depth(self) -> int:
        """The template's."""
        return self.template.depth

    def tree(self, tokens: Int[Array, "d m"], log_chance: Float[Array, "d m"], anchor: Int[Array, ""]) -> Draft:
        """One row's draft from the candidates of every depth, likeliest first."""
        ids = jnp.where(log_chance > -jnp.inf, tokens, -1)
        draft = static.place(self.template, anchor, ids, jnp.exp(jnp.minimum(log_chance, 0.0)))
        return dataclasses.replace(draft, proposal=self.ranking)


DepthShape = BestFirst | Choices
"""Shapes that combine every depth's marginals at once."""


@runtime_checkable
class DepthHead(Head, Protocol):
    """A `Head` that also says everything about a draft from the last pair's context."""

    def root(
        self,
        params: Any,
        state: Any,
        context: Float[Array, "b hidden"],
        anchor: Int[Array, "b"],
        shape: Growth | Branching,
    ) -> tuple[Expander, Any, Any, Float[Array, "b vocab"]]:
        """For drafts of a shape: an expander, its parameters, its pool with the root in it, the logits behind it."""
        ...


@dataclasses.dataclass(frozen=True)
class DepthTree(growing.Shaped):
    """A drafter over a head that needs no pass of a network per drafted level, or a very small one.

    A `Growth` asks the head behind every expanded node and a `Branching` draws, as in `HeadTree`. `BestFirst` (DDTree,
    arXiv 2604.12989) and `Choices` combine marginals, for a head that has them.

    Attributes:
        head: the head.
        shape: the drafts.
        learner: how weights are fitted, for a coupled shape.
    """

    head: DepthHead
    shape: Growth | Branching | DepthShape
    learner: Learner = Learner()

    def __post_init__(self) -> None:
        """Check that the pieces fit together."""
        if isinstance(self.shape, DepthShape):
            named, what = type(self.shape).__name__, type(self.head).__name__
            require(hasattr(self.head, "marginals"), "shape", f"{named} with {what}", "a Growth or Branching")
        most = getattr(self.head, "depth", None)
        if most is not None:
            require(self.shape.depth <= most, "shape", f"one of depth {self.shape.depth}", f"at most {most}")

    @property
    def vocab_size(self) -> int:
        """That of the head."""
        return self.head.vocab_size

    def init(self, params: Any, batch: int, max_len: int) -> HeadState:
        """Empty rows."""
        return self._reader.init(params, batch, max_len)

    def tap(self, output: Output) -> Array:
        """What the head reads of the features. Raises ValueError where the target returns none."""
        return self._reader.tap(output)

    def observe(self, params: Any, state: HeadState, committed: Committed) -> HeadState:
        """Read the committed tokens' pairs, and learn from a verdict, as `HeadTree` does."""
        return self._reader.observe(params, state, committed)

    def propose(self, params: Any, state: HeadState, context: Context) -> tuple[Draft, HeadState]:
        """The draft; a row without a pair is not drafted for."""
        shape = self.shape
        if isinstance(shape, DepthShape):
            head: Any = self.head
            logits = head.marginals(params, state.head, state.context, shape.depth)
            found = self._ranked(logits, context, state.fit)
            draft = jax.vmap(shape.tree)(found.tokens, found.log_chance, context.anchor)
            number, seen = jax.vmap(trees.depth)(draft.tree.parent), found.trace
            number = jnp.where(number < shape.depth, number, -1)
        else:
            pieces = self.head.root(params, state.head, state.context, context.anchor, shape)
            expander, weights, pool, logits = pieces
            draft, number, seen, _ = growing.draft(
                shape, self.learner, expander, weights, pool, logits, state.fit, context
            )
        return proposed(state, draft, number, seen)

    def insert(self, state: HeadState, rows: Int[Array, "r"], other: HeadState) -> HeadState:
        """Rows replaced; what was learned is the batch's, and that of the other state is left behind."""
        return self._reader.insert(state, rows, other)

    def release(self, state: HeadState, rows: Array, tokens: Array, length: Array) -> HeadState:
        """Rows emptied; what was learned stays."""
        return self._reader.release(state, rows, tokens, length)

    @property
    def _reader(self) -> HeadTree:
        return HeadTree(self.head, self._growth, self.learner)

    def _ranked(self, logits: Float[Array, "b d vocab"], context: Context, fit: Fit | None) -> Ranked:
        """The candidates of every depth [b, d, m], with what holds after the marginals' likeliest tokens before it."""
        growth = self._growth
        assert isinstance(growth, Growth)
        rank = ranking.ranker(growth, context, None if fit is None else self.learner.weights(fit))
        path = jnp.maximum(jax.vmap(jax.vmap(argmax))(logits), 0)[:, None]
        depths = jnp.arange(logits.shape[1])
        each = jax.vmap(lambda z, at: rank(z[:, None], path, at), (1, 0), 1)(logits, depths)
        return jax.tree.map(lambda x: x[:, :, 0], each)


def context_free(
    logits: Float[Array, "b d vocab"],
) -> tuple[Expander, None, Marginals, Float[Array, "b vocab"]]:
    """`DepthHead.root` for logits that do not depend on what is drafted."""
    return ContextFree(), None, Marginals(logits, jnp.int32(1)), logits[:, 0]
