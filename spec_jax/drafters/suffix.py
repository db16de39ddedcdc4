"""SuffixDecoding: draft what followed the longest match of the text's end, in the text or in earlier outputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from spec_jax.checks import check_sizes
from spec_jax.drafters import matches, trie
from spec_jax.drafters.drafter import Committed, Context
from spec_jax.models.target import Output
from spec_jax.tree import Draft

_NOTHING = 2**30


@flax.struct.dataclass
class SuffixState:
    """A ring of earlier outputs, each with NO_TOKEN behind it; and where each row's own output begins."""

    store: Int[Array, "s"]
    head: Int[Array, ""]
    begin: Int[Array, "b"]


@dataclasses.dataclass(frozen=True)
class Suffix:
    """Drafts from the places that agree with the end of the text for longest (after SuffixDecoding, arXiv 2411.04975).

    Places are looked for in the row's own text and in a store of the latest outputs of finished requests, which all
    rows share. The best `candidates` of them, merged, are the draft: the longest match wins, and of equals the row's
    own text before the store, and later before earlier. A match in the store counts as `store_penalty` tokens
    shorter. Instead of a suffix tree, every place is compared in every round; with static shapes that is the cheaper
    search at this size.

    Confidence comes from the matches' lengths and agreement (see `trie.merge`); it is meant for a controller that
    weighs it, such as `Throughput`. Through the store, one request's outputs change how fast, never what, another one
    emits.

    Attributes:
        nodes: nodes of a draft, the anchor among them.
        candidates: places whose continuations are merged.
        longest: longest match that is told from longer ones.
        store: tokens kept of earlier outputs; 0 keeps none.
        store_penalty: tokens taken off a match in the store.
    """

    nodes: int = 32
    candidates: int = 4
    longest: int = 32
    store: int = 16384
    store_penalty: int = 2

    vocab_size = None

    def __post_init__(self) -> None:
        """Check the settings."""
        check_sizes(self, nodes=2, candidates=1, longest=1, store=0, store_penalty=0)
        if self.store_penalty >= self.longest:
            raise ValueError(
                f"store_penalty: got {self.store_penalty}, takes less than longest, which is {self.longest}"
            )
        if 0 < self.store <= self.longest:
            raise ValueError(f"store: got {self.store}, takes 0 or more than longest, which is {self.longest}")

    @property
    def depth(self) -> int:
        """A draft can be one chain."""
        return self.nodes - 1

    def init(self, params: Any, batch: int, max_len: int) -> SuffixState:
        """An empty store."""
        empty = jnp.full(self.store, matches.NO_TOKEN, jnp.int32)
        return SuffixState(empty, jnp.int32(0), jnp.full(batch, _NOTHING, jnp.int32))

    def tap(self, output: Output) -> None:
        """The target's outputs are not needed."""

    def observe(self, params: Any, state: SuffixState, committed: Committed) -> SuffixState:
        """The text that `propose` is given is all that is needed."""
        return state

    def propose(self, params: Any, state: SuffixState, context: Context) -> tuple[Draft, SuffixState]:
        """The merged continuations of the best places; the anchor alone where nothing matches."""

        def row(tokens, length, room):
            found, following = self._candidates(state.store, tokens, length)
            following = jnp.where(jnp.arange(1, self.depth + 1) < room, following, matches.NO_TOKEN)
            return trie.merge(tokens[length - 1], following, found, self.nodes)

        room = jnp.where(context.active, context.room, 0)
        tree, confidence = jax.vmap(row)(context.tokens, context.length, room)
        begin = jnp.where(context.active, context.prompt_length, state.begin)
        return Draft(tree, confidence), dataclasses.replace(state, begin=begin)

    def insert(self, state: SuffixState, rows: Int[Array, "r"], other: SuffixState) -> SuffixState:
        """Rows replaced; the store stays that of `state`."""
        return dataclasses.replace(state, begin=state.begin.at[rows].set(other.begin, mode="drop"))

    def release(
        self, state: SuffixState, rows: Int[Array, "r"], tokens: Int[Array, "r text"], length: Int[Array, "r"]
    ) -> SuffixState:
        """Rows emptied; their outputs go to the store, over the oldest ones."""
        batch = state.begin.shape[0]
        begin = jnp.where(rows < batch, state.begin[jnp.minimum(rows, batch - 1)], _NOTHING)
        if self.store:
            ring = (state.store, state.head)
            ring, _ = lax.scan(lambda ring, text: (append(*ring, *text), None), ring, (tokens, begin, length))
            state = dataclasses.replace(state, store=ring[0], head=ring[1])
        return dataclasses.replace(state, begin=state.begin.at[rows].set(_NOTHING, mode="drop"))

    def _candidates(self, store: Array, tokens: Array, length: Array) -> tuple[Array, Array]:
        """The best places' match lengths, best first (0: none), and the tokens behind them, up to any NO_TOKEN."""
        end = matches.suffix(tokens, length, self.longest)
        place = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        agreed = jnp.where(place < length - 1, matches.match_lengths(tokens, end), 0)
        found, at = matches.best(agreed, self.candidates)
        following = jax.vmap(lambda i: matches.continuation(tokens, length, i, self.depth))(at)
        if not self.store:
            return found, following
        agreed = matches.match_lengths(store, end, ring=True) - self.store_penalty
        agreed = jnp.where(jnp.roll(store, -1) == matches.NO_TOKEN, 0, jnp.maximum(agreed, 0))
        stored, at = matches.best(agreed, self.candidates)
        behind = store[(at[:, None] + 1 + jnp.arange(self.depth)) % self.store]
        found, order = lax.top_k(jnp.concatenate([found, stored]), self.candidates)
        return found, jnp.concatenate([following, behind])[order]


def append(
    store: Int[Array, "s"], head: Int[Array, ""], tokens: Int[Array, "text"], begin: Array, length: Array
) -> tuple[Int[Array, "s"], Int[Array, ""]]:
    """The ring with tokens[begin:length], or as much of its end as fits, and NO_TOKEN behind it."""
    size = store.shape[0]
    kept = jnp.clip(length - begin, 0, size - 1)
    offset = jnp.arange(tokens.shape[0] + 1)
    value = tokens[jnp.clip(length - kept + offset, 0, tokens.shape[0] - 1)]
    value = jnp.where(offset < kept, value, matches.NO_TOKEN)
    slot = jnp.where((offset <= kept) & (kept > 0), (head + offset) % size, size)
    return store.at[slot].set(value, mode="drop"), (head + jnp.where(kept > 0, kept + 1, 0)) % size
