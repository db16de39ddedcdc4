"""A model that drafts speculatively: a cheaper drafter proposes, the model decides, and its choices are the draft."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from spec_jax.drafters.checks import check_follows
from spec_jax.drafters.drafter import Committed, Context, Drafter, memory_of
from spec_jax.models.config import is_size, require
from spec_jax.models.target import Output, Target
from spec_jax.sampling import history
from spec_jax.tree import Draft, Tree
from spec_jax.verify.match import match
from spec_jax.verify.scores import Scores


@flax.struct.dataclass
class CascadeState:
    """The states of the model and of the inner drafter, both over the committed text."""

    model: Any
    inner: Any


@dataclasses.dataclass(frozen=True)
class Cascade:
    """The chain of k tokens that a model chooses under the target's noise, found with fewer passes of the model.

    The vertical cascade of CS Drafting, and the second stage of staged speculative decoding. A pass of the model
    verifies the inner drafter's tree by position-keyed match, so the chain is the one that `SmallModel` drafts with any
    inner drafter. With `tail` the inner drafter's draft behind the chain's end stays in the draft: CS Drafting's
    horizontal cascade, the cheaper drafter for the later tokens. Verify it with `match`.

    Both states hold committed text alone: while a draft is made they are copies, and what was committed is then read by
    the model as a prompt is. max_len and block fix the state's size and must be at least the engine's.

    Attributes:
        model: the model; the drafter's parameters are its.
        inner: a drafter without parameters that follows the text (`Suffix`, `NGram`, `Recycling`).
        k: tokens that the model chooses.
        tail: whether the inner drafter's draft goes on behind them.
        block: tokens of a prefill chunk.

    Raises:
        ValueError: for an inner drafter that keeps state of its own drafts, or another Cascade.
    """

    model: Target
    inner: Drafter
    k: int
    tail: bool = False
    block: int = 64

    def __post_init__(self) -> None:
        """Check the settings."""
        require(is_size(self.k), "k", self.k, "a positive integer")
        check_follows("inner", self.inner)
        if isinstance(self.inner, Cascade):
            raise ValueError("inner: got a Cascade, takes a drafter without parameters")

    @property
    def nodes(self) -> int:
        """The anchor, the chain, and what may go on behind it."""
        return self.k + (self.inner.nodes if self.tail else 1)

    @property
    def depth(self) -> int:
        """The chain's, with the tail's."""
        return self.k + (self.inner.depth if self.tail else 0)

    @property
    def vocab_size(self) -> int:
        """The model's."""
        return self.model.vocab_size

    def init(self, params: Any, batch: int, max_len: int) -> CascadeState:
        """Empty rows."""
        room = max(self.block, self.nodes, self.k + self.inner.nodes)
        model = self.model.init_state(params, batch, max_len + room)
        return CascadeState(self.model.materialize(model), self.inner.init(None, batch, max_len))

    @property
    def memory(self) -> int:
        """The inner drafter's."""
        return memory_of(self.inner)

    def recall(self, state: CascadeState, memory: Int[Array, "b m"]) -> CascadeState:
        """What is remembered of each row's prompt, told to the inner drafter."""
        inner: Any = self.inner
        return dataclasses.replace(state, inner=inner.recall(state.inner, memory))

    def tap(self, output: Output) -> Any:
        """What the inner drafter keeps."""
        return self.inner.tap(output)

    def observe(self, params: Any, state: CascadeState, committed: Committed) -> CascadeState:
        """The model reads what was committed, a chunk or a verdict's path; the inner drafter is told."""
        _, model = self.model.prefill(params, state.model, committed.tokens, committed.length)
        return CascadeState(model, self.inner.observe(None, state.inner, committed))

    def propose(self, params: Any, state: CascadeState, context: Context) -> tuple[Draft, CascadeState]:
        """The draft; nothing of it is left in the states."""
        (b, size), k = context.tokens.shape, self.k
        want = jnp.where(context.active, jnp.clip(context.room - 1, 0, k), 0)

        def drafting(carry: Any) -> Array:
            return (carry[2] < want).any()

        def step(carry: Any) -> Any:
            model, text, count, limit, sure = carry
            here = dataclasses.replace(
                context,
                tokens=text,
                length=context.length + count,
                room=jnp.maximum(context.room - count, 0),
                state=limit,
                active=count < want,
                target=None,  # it is behind this text
            )
            inner, _ = self.inner.propose(None, state.inner, here)
            if inner.law is not None:
                raise ValueError(f"inner: got one whose drafts are {inner.proposal}, takes point or coupled ones")
            output, staged, model = self.model.score(params, model, inner.tree)
            verdict, peak = self._verdict(here, inner, output)
            keep = jnp.minimum(verdict.accepted + 1, want - count)
            model = self.model.commit(model, staged, verdict.path, keep)
            offset = jnp.arange(verdict.tokens.shape[1])
            slot = lambda at, most: jnp.where(offset < keep[:, None], at[:, None] + offset, most)  # noqa: E731
            put = jax.vmap(lambda x, at, new: x.at[at].set(new, mode="drop"))
            last = jnp.take_along_axis(verdict.states, jnp.maximum(keep - 1, 0)[:, None], axis=1)[:, 0]
            return (
                model,
                put(text, slot(here.length, size), jnp.maximum(verdict.tokens, 0)),
                count + keep,
                jnp.where(keep > 0, last, limit),
                put(sure, slot(count, k), peak),
            )

        carry = (state.model, context.tokens, jnp.zeros_like(want), context.state, jnp.ones((b, k)))
        _, text, _, limit, sure = lax.while_loop(drafting, step, carry)
        at = jnp.minimum(context.length[:, None] + jnp.arange(k), size - 1)
        chain = jnp.take_along_axis(text, at, axis=1)
        tokens = jnp.concatenate([context.anchor[:, None], chain], axis=1)
        parent = jnp.broadcast_to(jnp.arange(-1, k, dtype=jnp.int32), tokens.shape)
        valid = jnp.arange(k + 1) <= want[:, None]
        sure = jnp.concatenate([jnp.ones((b, 1)), sure], axis=1)
        draft = Draft(Tree(tokens, parent, valid), sure, proposal="coupled")
        return (self._with_tail(draft, state, context, text, limit) if self.tail else draft), state

    def insert(self, state: CascadeState, rows: Int[Array, "r"], other: CascadeState) -> CascadeState:
        """Rows replaced."""
        model = self.model.insert(state.model, rows, self.model.materialize(other.model))
        return CascadeState(model, self.inner.insert(state.inner, rows, other.inner))

    def release(self, state: CascadeState, rows: Array, tokens: Array, length: Array) -> CascadeState:
        """Rows emptied."""
        inner = self.inner.release(state.inner, rows, tokens, length)
        return CascadeState(self.model.release(state.model, rows), inner)

    def _verdict(self, here: Context, draft: Draft, output: Output) -> tuple[Any, Float[Array, "b m"]]:
        """What the model chooses along the draft, and the peak of its law there."""
        m = self.inner.depth + 1

        def one(key, draft, logits, row, text, prompt_length, length, limit):
            past = history.from_text(text, prompt_length, length, limit, self.vocab_size)
            verdict = match(key, draft, Scores(logits, row, past, length, here.constraint), m)
            return verdict, jax.nn.softmax(logits[verdict.path], axis=-1).max(-1)

        rows = (here.sampling, here.tokens, here.prompt_length, here.length, here.state)
        return jax.vmap(one)(here.key, draft, output.logits, *rows)

    def _with_tail(self, draft: Draft, state: CascadeState, context: Context, text: Array, limit: Array) -> Draft:
        """The draft with the inner drafter's behind its last node."""
        k = self.k
        whole = draft.tree.valid[:, -1]
        ahead = jnp.where(whole, k, 0)
        here = dataclasses.replace(
            context,
            tokens=text,
            length=context.length + ahead,
            room=jnp.maximum(context.room - ahead, 0),
            state=limit,
            active=context.active & whole,
            target=None,
        )
        more, _ = self.inner.propose(None, state.inner, here)
        join = lambda a, b: jnp.concatenate([a, b[:, 1:]], axis=1)  # noqa: E731
        tree = Tree(
            join(draft.tree.tokens, more.tree.tokens),
            join(draft.tree.parent, jnp.where(more.tree.parent <= 0, k, more.tree.parent + k)),
            join(draft.tree.valid, more.tree.valid & whole[:, None]),
        )
        return dataclasses.replace(draft, tree=tree, confidence=join(draft.confidence, more.confidence))
