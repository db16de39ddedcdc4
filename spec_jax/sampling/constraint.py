"""Constraints as tables: a finite automaton over token classes, stepped and masked in graph."""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

FREE = 0


@flax.struct.dataclass
class Constraint:
    """An automaton over the vocabulary, stored by token class: tokens that no state tells apart share a column.

    table[state, class] is the next state, or -1 where the token is not allowed. State 0 (FREE) allows every token and
    stays, so a row without a constraint is a row in state 0. Build it with `from_transitions` and join with `bank`.
    """

    classes: Int[Array, "vocab"]
    table: Int[Array, "states classes"]

    def mask(self, state: Int[Array, ""]) -> Bool[Array, "vocab"]:
        """The tokens allowed in a state; none in a number that is no state."""
        return (self.table[jnp.maximum(state, 0)] >= 0)[self.classes] & self._has(state)

    def step(self, state: Int[Array, ""], token: Int[Array, ""]) -> Int[Array, ""]:
        """The state after a token; -1 after one that is not allowed, and ever after."""
        return jnp.where(self._has(state), self.table[jnp.maximum(state, 0), self.classes[token]], -1)

    def _has(self, state: Int[Array, ""]) -> Bool[Array, ""]:
        return (state >= 0) & (state < self.table.shape[0])


def free(vocab_size: int) -> Constraint:
    """The constraint that allows everything."""
    return Constraint(jnp.zeros(vocab_size, jnp.int32), jnp.zeros((1, 1), jnp.int32))


def from_transitions(transitions: np.ndarray) -> Constraint:
    """A constraint from a [states, vocab] table of next states, -1 for not allowed; its states 0 .. S-1 become 1 .. S.

    Raises:
        ValueError: if an entry is no state, or a state allows no token at all (text could neither go on nor end there:
            let the end-of-sequence token loop in accepting states).
    """
    t = np.asarray(transitions)
    if t.ndim != 2 or not np.issubdtype(t.dtype, np.integer):
        raise ValueError(f"transitions: got {t.dtype}{list(t.shape)}, takes an integer [states, vocab] table")
    if t.size and (t.min() < -1 or t.max() >= len(t)):
        raise ValueError(f"transitions: got entries {t.min()} .. {t.max()}, takes -1 .. {len(t) - 1}")
    dead = np.flatnonzero((t < 0).all(axis=1))
    if dead.size:
        raise ValueError(f"transitions: got states {dead.tolist()} with no allowed token, takes at least one each")
    columns, classes = np.unique(t, axis=1, return_inverse=True)
    table = np.where(columns >= 0, columns + 1, -1)
    table = np.concatenate([np.zeros((1, table.shape[1]), table.dtype), table])
    return Constraint(jnp.asarray(classes.reshape(-1), jnp.int32), jnp.asarray(table, jnp.int32))


def bank(constraints: list[Constraint]) -> tuple[Constraint, list[int]]:
    """Several constraints as one table, and the first state (their state 1) of each in it."""
    if not constraints:
        raise ValueError("constraints: got an empty list, takes at least one Constraint")
    joint, classes = np.unique(np.stack([np.asarray(c.classes) for c in constraints]), axis=1, return_inverse=True)
    rows, starts, at = [np.zeros((1, joint.shape[1]), np.int32)], [], 1
    for c, column in zip(constraints, joint, strict=True):
        table = np.asarray(c.table)[1:, column]
        rows.append(np.where(table >= 0, table + at - 1, -1))
        starts.append(at)
        at += len(table)
    return Constraint(jnp.asarray(classes.reshape(-1), jnp.int32), jnp.asarray(np.concatenate(rows), jnp.int32)), starts
