"""Targets small enough to know all about: a table, and an attention audit model whose every output betrays a slip."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from spec_jax import tree as trees
from spec_jax.models.attention import held, kept_slots
from spec_jax.models.target import Output
from spec_jax.tree import Tree


@flax.struct.dataclass
class SlotState:
    """One number per slot, and the row lengths; with a window the slots are a ring (see `models.attention`)."""

    slots: Int[Array, "b s"]
    length: Int[Array, "b"]


class _SlotTarget:
    """State handling that the toy targets share: a cache of one integer per position, committed along paths."""

    def init_state(self, params: Any, batch: int, slots: int) -> SlotState:
        """Empty rows; unused slots hold a poison value."""
        return SlotState(jnp.full((batch, slots), POISON, jnp.int32), jnp.zeros(batch, jnp.int32))

    def entry(self, token: Array, position: Array) -> Array:
        """What a token leaves in its slot."""
        raise NotImplementedError

    def prefill(self, params: Any, state: SlotState, tokens: Array, count: Array) -> tuple[None, SlotState]:
        """Append the first `count` tokens to each row."""
        offset = jnp.arange(tokens.shape[1])
        entries = self.entry(tokens, state.length[:, None] + offset)
        return None, self.commit(state, entries, jnp.broadcast_to(offset, tokens.shape), count)

    def commit(self, state: SlotState, staged: Array, path: Array, length: Array) -> SlotState:
        """Write the staged entries along each path, and nothing past its accepted part."""
        rows = jnp.take_along_axis(staged, path, axis=1)
        offset = jnp.arange(path.shape[1])
        size, at = state.slots.shape[1], state.length[:, None] + offset
        kept = (offset < length[:, None]) & (at >= (state.length + length)[:, None] - size)
        slot = jnp.where(kept, at % size, size)
        slots = jax.vmap(lambda s, at, r: s.at[at].set(r, mode="drop"))(state.slots, slot, rows)
        return SlotState(slots, state.length + length)

    def widen(self, staged: Array, n: int) -> Array:
        """Room for n nodes."""
        return jnp.pad(staged, ((0, 0), (0, n - staged.shape[1])), constant_values=POISON)

    def materialize(self, state: SlotState) -> SlotState:
        """Nothing is ever pending."""
        return state

    def take(self, state: SlotState, rows: Array) -> SlotState:
        """Copies of rows."""
        return jax.tree.map(lambda x: x[rows], state)

    def insert(self, state: SlotState, rows: Array, other: SlotState) -> SlotState:
        """Rows replaced."""
        return jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), state, other)

    def release(self, state: SlotState, rows: Array) -> SlotState:
        """Rows emptied and poisoned."""
        put = lambda x, fill: x.at[rows].set(fill, mode="drop")  # noqa: E731
        return SlotState(put(state.slots, POISON), put(state.length, 0))


POISON = -(2**30)


@dataclasses.dataclass(frozen=True)
class TableTarget(_SlotTarget):
    """Logits looked up by the last `order` tokens; parameters are the table [V, ..., V] (order + 1 axes).

    Positions before the text count as token V - 1. A table with -inf in its last column makes V - 1 a start token.
    """

    vocab_size: int
    order: int = 1

    def entry(self, token: Array, position: Array) -> Array:
        """The token itself."""
        return token

    def score(
        self, params: Array, state: SlotState, tree: Tree, staged: Any = None, nodes: Any = None
    ) -> tuple[Output, Array, SlotState]:
        """Logits of every node from its own token and its ancestors'."""

        def one(slots, length, tokens, parent):
            at, last = jnp.arange(tokens.shape[0]), jnp.full(tokens.shape[0], length - 1)
            context = []
            for _ in range(self.order):
                in_tree = at >= 0
                before = jnp.where(last >= 0, slots[jnp.maximum(last, 0)], self.vocab_size - 1)
                context.append(jnp.where(in_tree, tokens[jnp.maximum(at, 0)], before))
                last = jnp.where(in_tree, last, last - 1)
                at = jnp.where(in_tree, parent[jnp.maximum(at, 0)], -1)
            return tuple(reversed(context))

        context = jax.vmap(one)(state.slots, state.length, tree.tokens, tree.parent)
        logits = params[context]
        start, n = (0, tree.tokens.shape[1]) if nodes is None else nodes
        return Output(lax.dynamic_slice_in_dim(logits, start, n, axis=1)), tree.tokens, state


@dataclasses.dataclass(frozen=True)
class AuditTarget(_SlotTarget):
    """Attention as a hash: h = sum over visible slots of (token + 1) * 5^position mod 97, logits = table[h].

    Any wrong token, position or visibility changes h, which is returned as the feature of every node. Texts stay under
    96 tokens, where 5^position is still one to one. Parameters are the table [97, V]. With a window, a node sees the
    last `window` positions up to its own, and no more slots are kept than that takes.
    """

    vocab_size: int
    window: int | None = None

    def init_state(self, params: Any, batch: int, slots: int) -> SlotState:
        """Empty rows; see `attention.kept_slots`."""
        return super().init_state(params, batch, kept_slots(slots, self.window))

    def entry(self, token: Array, position: Array) -> Array:
        """The term of one token at one position."""
        return (token + 1) * jnp.asarray(_POWERS)[position % 96] % 97

    def near(self, position: Array, own: Array) -> Array:
        """Whether a node at position `own` [B, N, 1] sees a position behind its own."""
        return jnp.bool_(True) if self.window is None else position > own - self.window

    def score(
        self, params: Array, state: SlotState, tree: Tree, staged: Any = None, nodes: Any = None
    ) -> tuple[Output, Array, SlotState]:
        """Hash and logits of every node over the committed slots and its ancestors."""
        reach = jax.vmap(trees.ancestors)(tree.parent)
        position = state.length[:, None] + reach.sum(-1) - 1
        terms = self.entry(tree.tokens, position)
        own, size = position[:, :, None], state.slots.shape[1]
        behind = held(jnp.arange(size), state.length[:, None, None], size)
        inside = (behind >= 0) & self.near(behind, own)
        prefix = jnp.where(inside, state.slots[:, None], 0).sum(-1)
        h = (prefix + jnp.where(reach & self.near(position[:, None], own), terms[:, None], 0).sum(-1)) % 97
        start, n = (0, h.shape[1]) if nodes is None else nodes
        h = lax.dynamic_slice_in_dim(h, start, n, axis=1)
        return Output(params[h], h[..., None]), terms, state


_POWERS = np.array([pow(5, i, 97) for i in range(96)], np.int32)


def audit_table(vocab_size: int, seed: int = 0, scale: float = 2.0) -> Float[Array, "97 v"]:
    """A random table for AuditTarget."""
    return jnp.asarray(np.random.default_rng(seed).normal(0, scale, (97, vocab_size)), jnp.float32)
