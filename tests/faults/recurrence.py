"""A recurrent target that can't be rewound, committed as the real ones are: what is accepted stays pending."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from spec_jax.models.target import Output

A, B, C, MOD, WIDTH = 5, 17, 3, 8191, 4
ROOM = 8
FAULTS = ("pending dropped", "pending folded twice", "window off by one", "a sibling's path", "one token too many")


def step(s, token):
    return (A * s + B * token + C) % MOD


def digest(s, window):
    """What logits are looked up by: the state and the last four tokens (-1 before the text), in order."""
    return (s + sum((t + 1) * pow(7, i) for i, t in enumerate(window))) % 97


@flax.struct.dataclass
class AuditState:
    """s and the last tokens of the text so far, less what is pending: accepted tokens that s lacks, and how many."""

    s: Array
    window: Array
    pending: Array | None
    count: Array | None
    length: Array


@dataclasses.dataclass(frozen=True)
class AuditRecurrence:
    """s' = (a s + b token + c) mod 8191 beside a window of four tokens; every output is looked up by both.

    The digest of every node is its feature. score folds what is pending and commit sets it, as for gated delta layers;
    a commit on a state with something pending is refused.
    """

    vocab_size: int
    fault: str = "none"

    def init_state(self, params: Any, batch: int, slots: int) -> AuditState:
        zeros = jnp.zeros(batch, jnp.int32)
        return AuditState(zeros, jnp.full((batch, WIDTH), -1), jnp.zeros((batch, ROOM), jnp.int32), zeros, zeros)

    def prefill(self, params: Any, state: AuditState, tokens: Array, count: Array) -> tuple[None, AuditState]:
        state = self.materialize(state)
        s, window = _read(state.s, state.window, tokens, count)
        return None, dataclasses.replace(state, s=s, window=window, length=state.length + count)

    def score(self, params: Array, state: AuditState, tree: Any, staged: Any = None, nodes: Any = None):
        assert staged is None and nodes is None
        folded = self.fold(state)
        if self.fault == "pending folded twice" and state.pending is not None:
            folded = dataclasses.replace(folded, s=self._folded(folded.s, state))
        s, windows = [], []
        for i in range(tree.tokens.shape[1]):
            above, token = tree.parent[:, i], tree.tokens[:, i]
            own, seen = folded.s, folded.window
            if i:
                pick = jnp.maximum(above, 0)[:, None]
                own = jnp.where(above < 0, own, jnp.take_along_axis(jnp.stack(s, 1), pick, axis=1)[:, 0])
                inside = jnp.take_along_axis(jnp.stack(windows, 1), pick[:, :, None], axis=1)[:, 0]
                seen = jnp.where((above < 0)[:, None], seen, inside)
            s.append(step(own, token))
            windows.append(jnp.concatenate([seen[:, 1:], token[:, None]], axis=1))
        h = digest(jnp.stack(s, 1), jnp.moveaxis(jnp.stack(windows, 1), -1, 0))
        return Output(params[h], h[..., None]), tree.tokens, folded

    def commit(self, state: AuditState, staged: Array, path: Array, length: Array) -> AuditState:
        if state.pending is not None:
            raise ValueError("state: got one with something pending, takes the state that score returned")
        rows, keep = jnp.take_along_axis(staged, path, axis=1), length
        if self.fault == "a sibling's path":
            last = (length - 1)[:, None] == jnp.arange(path.shape[1])
            beside = 1 + ((path - 1) ^ 1)  # siblings of the tests' tree stand in pairs, the first at an odd index
            rows = jnp.take_along_axis(staged, jnp.where(last & (path > 0), beside, path), axis=1)
        if self.fault == "one token too many":
            keep = length + (length > 1)
        tokens = jnp.take_along_axis(staged, path, axis=1)
        shift = length - (self.fault == "window off by one")
        window = _read(state.s, state.window, tokens, jnp.maximum(shift, 0))[1]
        pending = jnp.pad(rows, ((0, 0), (0, ROOM - rows.shape[1])))
        count = keep * (self.fault != "pending dropped")
        return AuditState(state.s, window, pending, count, state.length + length)

    def fold(self, state: AuditState) -> AuditState:
        """Nothing pending, ready for a commit."""
        if state.pending is None:
            return state
        return dataclasses.replace(state, s=self._folded(state.s, state), pending=None, count=None)

    def materialize(self, state: AuditState) -> AuditState:
        s = self.fold(state).s
        return dataclasses.replace(state, s=s, pending=jnp.zeros((*s.shape, ROOM), jnp.int32), count=jnp.zeros_like(s))

    def widen(self, staged: Array, n: int) -> Array:
        return jnp.pad(staged, ((0, 0), (0, n - staged.shape[1])))

    def take(self, state: AuditState, rows: Array) -> AuditState:
        return jax.tree.map(lambda x: x[rows], self.materialize(state))

    def insert(self, state: AuditState, rows: Array, other: AuditState) -> AuditState:
        put = lambda x, y: x.at[rows].set(y, mode="drop")  # noqa: E731
        return jax.tree.map(put, self.materialize(state), self.materialize(other))

    def release(self, state: AuditState, rows: Array) -> AuditState:
        empty = self.init_state(None, rows.shape[0], 0)
        return self.insert(state, rows, empty)

    def _folded(self, s: Array, state: AuditState) -> Array:
        assert state.pending is not None and state.count is not None
        return _read(s, state.window, state.pending, state.count)[0]


def _read(s: Array, window: Array, tokens: Array, count: Array) -> tuple[Array, Array]:
    def one(i, carry):
        s, window = carry
        token, live = tokens[:, i], i < count
        shifted = jnp.concatenate([window[:, 1:], token[:, None]], axis=1)
        return jnp.where(live, step(s, token), s), jnp.where(live[:, None], shifted, window)

    return lax.fori_loop(0, tokens.shape[1], one, (s, window))


def fresh(text):
    """The state after a text, in plain Python: s and the window."""
    s = 0
    for token in text:
        s = step(s, int(token))
    return s, [-1] * max(0, WIDTH - len(text)) + [int(t) for t in text[-WIDTH:]]


def logits_of(table):
    """The oracle's view."""
    table = np.asarray(table)
    return lambda text: table[digest(*fresh(text))]
