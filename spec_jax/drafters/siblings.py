"""Drafts from siblings: other samples of a row's prompt that run beside it, and earlier ones that were remembered."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32

from spec_jax.checks import check_sizes
from spec_jax.drafters import matches, trie
from spec_jax.drafters.drafter import Committed, Context
from spec_jax.models.target import Output
from spec_jax.tree import Draft


@flax.struct.dataclass
class SiblingsState:
    """A ring of earlier outputs of each row's prompt, each with NO_TOKEN behind it (see `rollout.memory`)."""

    memory: Int[Array, "b m"]


@dataclasses.dataclass(frozen=True)
class Siblings:
    """Drafts what followed the longest match of the text's end, in the row itself or in a sample of the same prompt.

    Samples of the same prompt are rows of the batch, finished ones too until their slot is released, and those that
    `recall` gave. The best `candidates` places are merged into one tree in which places that agree add up, so that what
    most siblings say comes first: consensus among parallel samples as a suffix search, in our reading. Which rows are
    siblings follows from their prompts' fingerprints; two prompts of one fingerprint would cost speed only.

    Attributes:
        nodes: nodes of a draft, the anchor among them.
        candidates: places whose continuations are merged.
        longest: longest match that is told from longer ones.
        peers: most rows of the batch that are searched, the longest texts first; 0 searches none.
        memory: remembered tokens a row; 0 remembers none.
    """

    nodes: int = 16
    candidates: int = 6
    longest: int = 16
    peers: int = 4
    memory: int = 2048

    vocab_size = None

    def __post_init__(self) -> None:
        """Check the settings."""
        check_sizes(self, nodes=2, candidates=1, longest=1, peers=0, memory=0)
        if 0 < self.memory <= self.longest:
            raise ValueError(f"memory: got {self.memory}, takes 0 or more than longest, which is {self.longest}")

    @property
    def depth(self) -> int:
        """A draft can be one chain."""
        return self.nodes - 1

    def init(self, params: Any, batch: int, max_len: int) -> SiblingsState:
        """Nothing remembered."""
        return SiblingsState(jnp.full((batch, self.memory), matches.NO_TOKEN, jnp.int32))

    def recall(self, state: SiblingsState, memory: Int[Array, "b m"]) -> SiblingsState:
        """The state with what is remembered of each row's prompt."""
        return dataclasses.replace(state, memory=memory)

    def tap(self, output: Output) -> None:
        """The target's outputs are not needed."""

    def observe(self, params: Any, state: SiblingsState, committed: Committed) -> SiblingsState:
        """The text that `propose` is given is all that is needed."""
        return state

    def propose(self, params: Any, state: SiblingsState, context: Context) -> tuple[Draft, SiblingsState]:
        """The merged continuations of the best places; the anchor alone where nothing matches."""

        def row(tokens, length, room, peers, memory):
            end = matches.suffix(tokens, length, self.longest)
            sources = [self._own(tokens, length, end)]
            if self.peers:
                sources.append(self._best(peers, matches.match_lengths(peers, end)))
            if self.memory:
                sources.append(self._best(memory, matches.match_lengths(memory, end, ring=True)))
            found, following = (jnp.concatenate(x) for x in zip(*sources, strict=True))
            found, order = lax.top_k(found, self.candidates)
            following = jnp.where(jnp.arange(1, self.depth + 1) < room, following[order], matches.NO_TOKEN)
            return trie.merge(tokens[length - 1], following, found, self.nodes)

        room = jnp.where(context.active, context.room, 0)
        texts = (context.tokens, context.length, room, self._peers(context), state.memory)
        tree, confidence = jax.vmap(row)(*texts)
        return Draft(tree, confidence), state

    def insert(self, state: SiblingsState, rows: Int[Array, "r"], other: SiblingsState) -> SiblingsState:
        """Rows replaced."""
        return SiblingsState(state.memory.at[rows].set(other.memory, mode="drop"))

    def release(self, state: SiblingsState, rows: Array, tokens: Array, length: Array) -> SiblingsState:
        """Rows emptied; keeping their texts is the caller's (`rollout.memory`)."""
        return SiblingsState(state.memory.at[rows].set(matches.NO_TOKEN, mode="drop"))

    def _own(self, tokens: Array, length: Array, end: Array) -> tuple[Array, Array]:
        place = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        agreed = jnp.where(place < length - 1, matches.match_lengths(tokens, end), 0)
        found, at = matches.best(agreed, self.candidates)
        return found, jax.vmap(lambda i: matches.continuation(tokens, length, i, self.depth))(at)

    def _best(self, buffer: Array, agreed: Array) -> tuple[Array, Array]:
        """Of a buffer of texts, the best places' match lengths (0: none) and the tokens behind them."""
        agreed = jnp.where(jnp.roll(buffer, -1) == matches.NO_TOKEN, 0, agreed)
        found, at = matches.best(agreed, self.candidates)
        return found, buffer[(at[:, None] + 1 + jnp.arange(self.depth)) % buffer.shape[0]]

    def _peers(self, context: Context) -> Int[Array, "b n"]:
        """The siblings' texts of every row, one behind another, with NO_TOKEN between."""
        batch, size = context.tokens.shape
        count = min(self.peers, batch)
        if not count:
            return jnp.zeros((batch, 0), jnp.int32)
        length = jnp.where(siblings(context.tokens, context.prompt_length), context.length, 0)
        length = jnp.where(length > context.prompt_length, length, 0)
        length, at = lax.top_k(length, count)
        texts = jnp.where(jnp.arange(size) < length[..., None], context.tokens[at], matches.NO_TOKEN)
        return jnp.pad(texts, ((0, 0), (0, 0), (0, 1)), constant_values=matches.NO_TOKEN).reshape(batch, -1)


def siblings(tokens: Int[Array, "b text"], prompt_length: Int[Array, "b"]) -> Bool[Array, "b b"]:
    """Which rows have the same prompt (by fingerprint), a row and itself left out."""
    mark = fingerprint(tokens, prompt_length)
    same = (mark[:, None] == mark) & (prompt_length[:, None] == prompt_length) & (prompt_length > 0)
    return same & ~jnp.eye(tokens.shape[0], dtype=bool)


def fingerprint(tokens: Int[Array, "b text"], length: Int[Array, "b"]) -> UInt32[Array, "b"]:
    """A polynomial of tokens[:length] modulo 2**32."""
    powers = np.multiply.accumulate(np.full(tokens.shape[1], 2654435769, np.uint32), dtype=np.uint32)
    terms = (tokens.astype(jnp.uint32) + 1) * jnp.asarray(powers)
    return jnp.where(jnp.arange(tokens.shape[1]) < length[:, None], terms, 0).sum(1, dtype=jnp.uint32)
