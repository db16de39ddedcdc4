"""A drafter and a retrieval drafter as one: the tree of both drafts' paths."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from spec_jax.checks import check_sizes
from spec_jax.drafters.checks import check_follows
from spec_jax.drafters.drafter import Committed, Context, Drafter
from spec_jax.drafters.several import Joined, States
from spec_jax.drafters.suffix import Suffix
from spec_jax.topology.compact import log_chance
from spec_jax.topology.merge import merge_traced
from spec_jax.tree import Draft, alone


@flax.struct.dataclass
class CombinedState(States):
    """Both drafters' states, and the index of each node in the drafter's own draft (-1: retrieved)."""

    own: Int[Array, "b n"]


@dataclasses.dataclass(frozen=True)
class Combined(Joined):
    """The tree of a drafter's paths and of retrieved continuations, likeliest nodes first; verify it with `match`.

    The fusion is RASD's (arXiv 2503.03434); with `keep` it is Graft's (arXiv 2605.20104), the drafter's tree being
    given the size that is left of it after pruning. Any block drafter, or head on the target's features, will do; it
    goes on learning its weights from what the verdict says of its own nodes. The parameters are the drafter's.

    With `enough` retrieval goes first, and the drafter is run where it found little: the fallback of SuffixDecoding
    (arXiv 2411.04975). It goes by a whole batch, for a step of the drafter costs the same for one row as for all.

    Attributes:
        drafter: the drafter; its drafts must not be drawn ones.
        retrieval: the drafter of retrieved continuations.
        nodes: nodes of the joined draft, the anchor among them.
        keep: whether all of the drafter's nodes stay, and retrieved ones only fill the room that is left.
        enough: the drafter is left out of a round in which retrieval expects so many accepted tokens (the sum of its
            nodes' path chances) in every row; None runs it always.

    Raises:
        ValueError: for a model, which commits what it computed for its own nodes, Lookahead, whose window is among
            them, and a drafter made of several: others' drafts leave some out.
    """

    drafter: Drafter
    retrieval: Drafter = Suffix()
    nodes: int = 32
    keep: bool = False
    enough: float | None = None

    keeps_draft = True

    def __post_init__(self) -> None:
        """Check the settings."""
        check_sizes(self, nodes=2)
        for name, source in (("drafter", self.drafter), ("retrieval", self.retrieval)):
            check_follows(name, source)
        if self.enough is not None and self.enough <= 0:
            raise ValueError(f"enough: got {self.enough}, takes a positive number of tokens or None")
        if self.keep and self.drafter.nodes > self.nodes:
            raise ValueError(f"nodes: got {self.nodes}, takes at least the drafter's {self.drafter.nodes}, which stay")

    @property
    def members(self) -> tuple[Drafter, Drafter]:
        """Both drafters."""
        return self.drafter, self.retrieval

    @property
    def depth(self) -> int:
        """That of the deeper source."""
        return min(self.nodes - 1, max(self.drafter.depth, self.retrieval.depth))

    @property
    def vocab_size(self) -> int | None:
        """The drafter's."""
        return self.drafter.vocab_size

    def init(self, params: Any, batch: int, max_len: int) -> CombinedState:
        """Both states, empty."""
        states = super().init(params, batch, max_len).states
        return CombinedState(states, jnp.full((batch, self.nodes), -1, jnp.int32))

    def observe(self, params: Any, state: CombinedState, committed: Committed) -> CombinedState:
        """Both states after a block was committed."""
        if committed.tree is not None:
            path = jnp.clip(committed.path, 0, self.nodes - 1)
            committed = dataclasses.replace(committed, own=jnp.take_along_axis(state.own, path, axis=1))
        return super().observe(params, state, committed)

    def propose(self, params: Any, state: CombinedState, context: Context) -> tuple[Draft, CombinedState]:
        """The joined drafts. Raises ValueError for drawn ones: a tree chosen among them has not their law."""
        mine, its = state.states
        second, two = self.retrieval.propose(params, its, context)
        draw = functools.partial(self.drafter.propose, params, mine, context)
        if self.enough is None:
            first, one = draw()
        else:
            like = jax.eval_shape(draw)[0]
            expected = jnp.exp(jax.vmap(log_chance)(second))[:, 1:].sum(axis=1)
            found = jnp.all(~context.active | (expected >= self.enough))
            first, one = lax.cond(found, lambda: (alone(like, context.anchor), mine), draw)
        for name, draft in (("drafter", first), ("retrieval", second)):
            if draft.law is not None:
                raise ValueError(f"{name}: got one whose drafts are {draft.proposal}, takes point or coupled ones")
        join = jax.vmap(lambda a, b: merge_traced(a, b, self.nodes, self.keep))
        draft, own = join(first, second)
        return draft, CombinedState((one, two), own)
