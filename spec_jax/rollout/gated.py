"""A drafter that can be left out, so that a round costs what plain decoding costs, and taken up again."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from spec_jax.control.budget import Around
from spec_jax.drafters.drafter import Committed, Context, Drafter, memory_of
from spec_jax.drafters.features import along_path, required
from spec_jax.drafters.none import NoDrafter
from spec_jax.models.target import Output
from spec_jax.tree import Draft, alone
from spec_jax.verify.verdict import Verdict


@flax.struct.dataclass
class Gate:
    """The parameters of a gated drafter: it drafts while at most `rows` rows run, by its own parameters `inner`.

    Where `rows` is 0 it is not told of prompts that are prefilled, either, unless it reads the target's features.
    """

    rows: Int[Array, ""]
    inner: Any


@flax.struct.dataclass
class GatedState:
    """The drafter's state, how many tokens of each row it knows, and whether it drafted in this round."""

    inner: Any
    known: Int[Array, "b"]
    on: Bool[Array, ""]


@flax.struct.dataclass
class Taps:
    """What a drafter keeps of scored nodes, and the target's features there, for the rounds in which it is off."""

    own: Any
    features: Array


@dataclasses.dataclass(frozen=True)
class Gated:
    """Drafts while few rows run: speculation off where the batch is compute-bound, on as rows finish.

    The toggle of EfficientRollout in our reading, by a number of rows; `rollout.toggle` goes by times, and leaves the
    drafter out of whole programs. While it is off, neither draft nor state costs anything. Before it drafts again, the
    drafter is told what was committed meanwhile, in prefill chunks. A store that is filled by `release` (`Suffix`) gets
    the texts of rows that were drafted for at all.

    A drafter that reads the target's features, such as an EAGLE head, can't be told later: while it is off it hears of
    every token in its round, as of a prefill chunk, and its drafts alone cost nothing. What a drafter learns from the
    target's logits (Token Recycling, say), it learns in rounds that draft.

    Attributes:
        drafter: the drafter.
        chunk: tokens told at a time.
        reads: whether it reads the target's features. Where it does and this is False, `propose` raises ValueError.
    """

    drafter: Drafter
    chunk: int = 64
    reads: bool = False

    @property
    def nodes(self) -> int:
        """The drafter's."""
        return self.drafter.nodes

    @property
    def depth(self) -> int:
        """The drafter's."""
        return self.drafter.depth

    @property
    def keeps_draft(self) -> bool:
        """Whether the drafter does."""
        return getattr(self.drafter, "keeps_draft", False)

    @property
    def vocab_size(self) -> int | None:
        """The drafter's."""
        return self.drafter.vocab_size

    def init(self, params: Gate, batch: int, max_len: int) -> GatedState:
        """Empty rows."""
        inner = self.drafter.init(params.inner, batch, max_len)
        return GatedState(inner, jnp.zeros(batch, jnp.int32), jnp.bool_(True))

    @property
    def memory(self) -> int:
        """The drafter's."""
        return memory_of(self.drafter)

    def recall(self, state: GatedState, memory: Int[Array, "b m"]) -> GatedState:
        """What is remembered of each row's prompt, told to the drafter."""
        return dataclasses.replace(state, inner=self.drafter.recall(state.inner, memory))  # type: ignore[attr-defined]

    def tap(self, output: Output) -> Any:
        """What the drafter keeps, and the features if it reads them; ValueError where the target returns none."""
        own = self.drafter.tap(output)
        return Taps(own, required(output.features)) if self.reads else own

    def observe(self, params: Gate, state: GatedState, committed: Committed) -> GatedState:
        """Prefill chunks unless it is off for any number of rows, and verdicts on its own drafts; else see `missed`."""
        if committed.tree is None:
            tell = lambda: self._told(params, state, committed)  # noqa: E731
            return tell() if self.reads else lax.cond(params.rows > 0, tell, lambda: state)
        own = dataclasses.replace(committed, taps=committed.taps.own) if self.reads else committed
        return lax.cond(
            state.on,
            lambda: self._told(params, state, own),
            lambda: self.missed(params, state, committed),
        )

    def missed(self, params: Gate, state: GatedState, committed: Committed) -> GatedState:
        """The state after a verdict on no draft of its own: one that reads features is told, as of a prefill chunk."""
        if not self.reads:
            return state
        count = jnp.broadcast_to(jnp.arange(committed.path.shape[1]), committed.path.shape)
        read = lambda taps: dataclasses.replace(committed, taps=taps, tree=None, path=count)  # noqa: E731
        features = along_path(dataclasses.replace(committed, taps=committed.taps.features), lambda x: x)
        return self._told(params, state, read(features))

    def propose(self, params: Gate, state: GatedState, context: Context) -> tuple[Draft, GatedState]:
        """The drafter's draft, or the anchor alone."""
        shape = jax.eval_shape(self.drafter.propose, params.inner, state.inner, context)[0]
        on = context.active.sum() <= params.rows

        def drafted() -> tuple[Draft, Any, Array]:
            inner, known = self._caught_up(params.inner, state, context)
            draft, inner = self.drafter.propose(params.inner, inner, context)
            return draft, inner, known

        def nothing() -> tuple[Draft, Any, Array]:
            return alone(shape, context.anchor), state.inner, state.known

        draft, inner, known = lax.cond(on, drafted, nothing)
        return draft, GatedState(inner, known, on)

    def insert(self, state: GatedState, rows: Int[Array, "r"], other: GatedState) -> GatedState:
        """Rows replaced."""
        inner = self.drafter.insert(state.inner, rows, other.inner)
        return GatedState(inner, state.known.at[rows].set(other.known, mode="drop"), state.on)

    def release(self, state: GatedState, rows: Array, tokens: Array, length: Array) -> GatedState:
        """Rows emptied."""
        inner = self.drafter.release(state.inner, rows, tokens, length)
        return GatedState(inner, state.known.at[rows].set(0, mode="drop"), state.on)

    def _told(self, params: Gate, state: GatedState, committed: Committed) -> GatedState:
        inner = self.drafter.observe(params.inner, state.inner, committed)
        known = jnp.maximum(state.known, committed.start + committed.length)
        return dataclasses.replace(state, inner=inner, known=known)

    def _caught_up(self, params: Any, state: GatedState, context: Context) -> tuple[Any, Array]:
        """The drafter's state and what it knows once it has been told all text up to the anchor."""
        if self.reads:
            return state.inner, state.known
        todo = jnp.where(context.active, context.length - 1, 0)
        size = context.tokens.shape[1]
        offset = jnp.arange(self.chunk)

        def tell(carry: tuple[Any, Array]) -> tuple[Any, Array]:
            inner, known = carry
            count = jnp.clip(todo - known, 0, self.chunk)
            at = jnp.clip(known[:, None] + offset, 0, size - 1)
            after = jnp.clip(known + count, 0, size - 1)[:, None]
            committed = Committed(
                tokens=jnp.take_along_axis(context.tokens, at, axis=1),
                start=known,
                length=count,
                next_token=jnp.take_along_axis(context.tokens, after, axis=1)[:, 0],
                path=jnp.broadcast_to(offset, at.shape),
            )
            return self.drafter.observe(params, inner, committed), known + count

        return lax.while_loop(lambda carry: (carry[1] < todo).any(), tell, (state.inner, state.known))


@dataclasses.dataclass(frozen=True)
class Listening(Gated):
    """A gated drafter in a program of plain rounds, on the same state: the anchor alone is its draft."""

    @property
    def nodes(self) -> int:
        """1."""
        return 1

    @property
    def depth(self) -> int:
        """0."""
        return 0

    def observe(self, params: Gate, state: GatedState, committed: Committed) -> GatedState:
        """See `Gated.missed`."""
        return self.missed(params, state, committed)

    def propose(self, params: Gate, state: GatedState, context: Context) -> tuple[Draft, GatedState]:
        """The anchor."""
        return NoDrafter().propose(None, (), context)[0], state


@dataclasses.dataclass(frozen=True)
class IfDrafted(Around):
    """Another controller's width, or the cheapest one in a round in which no row has a draft."""

    def decide(
        self, state: Any, draft: Draft, active: Bool[Array, "b"], cost: Float[Array, "w"], widths: tuple[int, ...]
    ) -> Int[Array, ""]:
        """The index of the width; the narrowest of equals. Going by cost, it can be told which by `measure_cost`."""
        cheapest = jnp.argmin(cost).astype(jnp.int32)
        return jnp.where(_drafted(draft, active), super().decide(state, draft, active, cost, widths), cheapest)

    def observe(
        self, state: Any, draft: Draft, width: Int[Array, ""], verdict: Verdict, active: Bool[Array, "b"]
    ) -> Any:
        """The other controller's state after a round; rounds without a draft say nothing."""
        drafted = _drafted(draft, active)
        after = super().observe(state, draft, width, verdict, active)
        return jax.tree.map(lambda new, old: jnp.where(drafted, new, old), after, state)


def _drafted(draft: Draft, active: Bool[Array, "b"]) -> Bool[Array, ""]:
    """Whether any row that runs has a draft."""
    return (draft.tree.valid[:, 1:] & active[:, None]).any()
