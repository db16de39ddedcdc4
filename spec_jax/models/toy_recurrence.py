"""An audit target with a state that cannot be cropped: exact integers, and the discipline of a lazy commit."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from spec_jax.models.delta_conv import windows
from spec_jax.models.target import Output
from spec_jax.tree import Tree

_MODULUS, _WIDTH = 8191, 4


@flax.struct.dataclass
class Accepted:
    """Tokens that the state lacks, the first `count` of each row."""

    tokens: Int[Array, "b p"]
    count: Int[Array, "b"]


@flax.struct.dataclass
class RecurrenceState:
    """s and the last tokens (-1 before the text), both without what is pending; None between score and commit."""

    s: Int[Array, "b"]
    last: Int[Array, "b width"]
    length: Int[Array, "b"]
    pending: Accepted | None


@dataclasses.dataclass(frozen=True)
class RecurrenceTarget:
    """s <- (a s + b token + c) mod 8191 beside a window of the last 4 tokens; logits = table[hash of both mod 97].

    Every node's features are s and the window behind it, so that any slip of the state shows. Parameters are the table
    [97, V] (`toy.audit_table`). A commit waits as tokens until the next score folds it in; one of more than
    `pending_rows` tokens is folded at once.
    """

    vocab_size: int
    a: int = 1999
    b: int = 73
    c: int = 17
    pending_rows: int = 8

    def init_state(self, params: Array, batch: int, slots: int) -> RecurrenceState:
        """Rows without text."""
        zeros = jnp.zeros(batch, jnp.int32)
        return RecurrenceState(zeros, jnp.full((batch, _WIDTH), -1, jnp.int32), zeros, self._none(batch))

    def prefill(
        self, params: Array, state: RecurrenceState, tokens: Int[Array, "b p"], count: Int[Array, "b"]
    ) -> tuple[None, RecurrenceState]:
        """Append the first `count` tokens to each row."""
        state = self._fold(state)
        s, last = self._read(state, tokens, count)
        return None, RecurrenceState(s, last, state.length + count, self._none(len(s)))

    def score(
        self,
        params: Float[Array, "97 v"],
        state: RecurrenceState,
        tree: Tree,
        staged: Int[Array, "b m"] | None = None,
        nodes: tuple[Int[Array, ""] | int, int] | None = None,
    ) -> tuple[Output, Int[Array, "b m"], RecurrenceState]:
        """s and window along every node's path; staged are the tokens."""
        state = self._fold(state)
        start, n = (0, tree.tokens.shape[1]) if nodes is None else nodes
        cut = lambda x: lax.dynamic_slice_in_dim(x, start, n, axis=1)  # noqa: E731
        put = lambda to: lax.dynamic_update_slice_in_dim(to, cut(tree.tokens), start, axis=1)  # noqa: E731
        staged = tree.tokens if staged is None else put(staged)

        def one(s: Array, last: Array, tokens: Array, parent: Array) -> tuple[Array, Array]:
            def node(known: Array, i: Array) -> tuple[Array, None]:
                above = jnp.where(parent[i] < 0, s, known[jnp.maximum(parent[i], 0)])
                return known.at[i].set(self._next(above, tokens[i])), None

            along = lax.scan(node, jnp.zeros_like(tokens), jnp.arange(tokens.shape[0]))[0]
            return along, jnp.concatenate([last[1:], tokens])[windows(parent, _WIDTH)]

        s, window = jax.vmap(one)(state.s, state.last, staged, tree.parent)
        s, window = cut(s), cut(window)
        h = (s + ((window + 1) * jnp.asarray([3, 5, 7, 11])).sum(-1)) % 97
        return Output(params[h], jnp.concatenate([s[..., None], window], axis=-1)), staged, state

    def widen(self, staged: Int[Array, "b m"], n: int) -> Int[Array, "b n"]:
        """Room for n nodes."""
        return jnp.pad(staged, ((0, 0), (0, n - staged.shape[1])), constant_values=-1)

    def commit(
        self, state: RecurrenceState, staged: Int[Array, "b m"], path: Int[Array, "b p"], length: Int[Array, "b"]
    ) -> RecurrenceState:
        """Set the accepted tokens aside; ValueError for a state in which some may be already."""
        if state.pending is not None:
            raise ValueError("state: got one with accepted tokens pending, takes the state that score returned")
        tokens = jnp.take_along_axis(staged, path, axis=1)
        moved = dataclasses.replace(state, length=state.length + length)
        if (more := self.pending_rows - path.shape[1]) >= 0:
            return dataclasses.replace(moved, pending=Accepted(jnp.pad(tokens, ((0, 0), (0, more))), length))
        s, last = self._read(state, tokens, length)
        return dataclasses.replace(moved, s=s, last=last, pending=self._none(len(s)))

    def materialize(self, state: RecurrenceState) -> RecurrenceState:
        """Everything in s and the window."""
        return dataclasses.replace(self._fold(state), pending=self._none(len(state.s)))

    def take(self, state: RecurrenceState, rows: Int[Array, "r"]) -> RecurrenceState:
        """Copies of rows."""
        return jax.tree.map(lambda x: x[rows], self._full(state))

    def insert(self, state: RecurrenceState, rows: Int[Array, "r"], other: RecurrenceState) -> RecurrenceState:
        """Rows replaced."""
        return jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), self._full(state), self._full(other))

    def release(self, state: RecurrenceState, rows: Int[Array, "r"]) -> RecurrenceState:
        """Rows emptied."""
        return self.insert(state, rows, self.init_state(jnp.zeros(()), rows.shape[0], 0))

    def _next(self, s: Array, token: Array) -> Array:
        return (self.a * s + self.b * token + self.c) % _MODULUS

    def _read(self, state: RecurrenceState, tokens: Array, count: Array) -> tuple[Array, Array]:
        """s and window behind the first `count` tokens."""
        step = lambda s, x: (jnp.where(x[1] < count, self._next(s, x[0]), s), None)  # noqa: E731
        s = lax.scan(step, state.s, (tokens.T, jnp.arange(tokens.shape[1])))[0]
        at = count[:, None] + jnp.arange(_WIDTH)
        return s, jnp.take_along_axis(jnp.concatenate([state.last, tokens], axis=1), at, axis=1)

    def _fold(self, state: RecurrenceState) -> RecurrenceState:
        if state.pending is None:
            return state
        s, last = self._read(state, state.pending.tokens, state.pending.count)
        return RecurrenceState(s, last, state.length, None)

    def _full(self, state: RecurrenceState) -> RecurrenceState:
        return state if state.pending is not None else dataclasses.replace(state, pending=self._none(len(state.s)))

    def _none(self, batch: int) -> Accepted:
        return Accepted(jnp.zeros((batch, self.pending_rows), jnp.int32), jnp.zeros(batch, jnp.int32))
