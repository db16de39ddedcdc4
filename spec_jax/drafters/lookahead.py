"""Lookahead decoding: the target's guesses at later tokens, renewed in the pass that verifies (arXiv 2402.02057)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from spec_jax import noise
from spec_jax.checks import check_sizes
from spec_jax.drafters import ngram_ring
from spec_jax.drafters.drafter import Committed, Context
from spec_jax.drafters.laws import Laws, likeliest
from spec_jax.drafters.ngram_ring import NGrams
from spec_jax.models.target import Output
from spec_jax.topology.merge import speakers
from spec_jax.tree import Draft, Tree

_WINDOW, _POOLED = 0.15, 0.3


@flax.struct.dataclass
class LookaheadState:
    """Each row's window, its first `filled` levels in use, and its n-grams.

    window[l, i] is a guess at the token l + i places behind the anchor; window[0, 0] is the anchor's place. Of the
    draft that is being verified: `node` is the node that stands for each of it, and key and temperature are those that
    the target chooses with.
    """

    window: Int[Array, "b l w"]
    filled: Int[Array, "b"]
    ngrams: NGrams
    node: Int[Array, "b n"]
    key: Array
    temperature: Float[Array, "b"]


@dataclasses.dataclass(frozen=True)
class Lookahead:
    """Drafts n-grams that the target wrote in earlier passes, and has it write more beside them; verify with `match`.

    A window of `ngram` - 1 levels holds guesses at `window` places. Its first level is a chain below the anchor; below
    each token of it hangs a branch, that token's later levels. What the target chooses behind a branch is the next
    token of it: with the branch and its place in the chain an n-gram, which goes to the row's pool, while the oldest
    level is dropped (Jacobi iteration in two dimensions, the paper's Figure 2). The window is one part of a draft's
    tree, and the latest n-grams that start with the anchor are the other.

    Differences: window and n-grams are nodes of one tree, so that the target may accept the window's guesses too, and
    nodes that say the same are scored once. The window moves on by as many places as were accepted, its end being
    filled with what fell off its front, where the authors' moves by one. At a temperature the target's choices behind
    branches are made with the noise of the places that they are guesses at, so that the iteration comes to rest at the
    sampled text as it does at the greedy one; the row's truncation, penalties and constraint are left out there. A
    controller that cuts the draft stops the window for that round.

    Attributes:
        window: places of the window, W.
        ngram: tokens of an n-gram, N.
        guesses: n-grams of a draft, G.
        pool: n-grams kept of each row.
        candidates: tokens of a node among which the target's choice is looked for; 1 takes the likeliest always.
    """

    window: int = 10
    ngram: int = 4
    guesses: int = 6
    pool: int = 512
    candidates: int = 16

    vocab_size = None
    keeps_draft = True

    def __post_init__(self) -> None:
        """Check the settings."""
        check_sizes(self, window=1, ngram=3, guesses=1, pool=1, candidates=1)
        if self.pool < max(self.window, self.guesses):
            least = max(self.window, self.guesses)
            raise ValueError(f"pool: got {self.pool}, takes at least window and guesses, which is {least}")

    @property
    def nodes(self) -> int:
        """(W + G) (N - 1), the anchor among them."""
        return self.window_nodes + self.guesses * (self.ngram - 1)

    @property
    def window_nodes(self) -> int:
        """W (N - 1), the anchor among them: the first nodes of a draft."""
        return self.window * (self.ngram - 1)

    @property
    def depth(self) -> int:
        """That of the last branch, or of an n-gram."""
        return max(self.window + self.ngram - 3, self.ngram - 1)

    @functools.cached_property
    def shape(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Every node's parent and depth, and the node of every place of the window [l, w]."""
        w, levels = self.window, self.ngram - 1
        branch = w + np.arange(w) * (levels - 1) + np.arange(levels - 1)[:, None]
        at = np.concatenate([np.arange(w)[None], branch])
        parent, depth = np.full(self.nodes, -1), np.zeros(self.nodes, int)
        parent[at[0]], depth[at[0]] = np.arange(-1, w - 1), np.arange(w)
        parent[at[1:]], depth[at[1:]] = at[:-1], np.arange(w) + np.arange(1, levels)[:, None]
        rank = np.arange(self.nodes - self.window_nodes) % levels
        pooled = np.arange(self.window_nodes, self.nodes)
        parent[pooled], depth[pooled] = np.where(rank == 0, 0, pooled - 1), rank + 1
        return parent, depth, at

    def init(self, params: Any, batch: int, max_len: int) -> LookaheadState:
        """No guesses."""
        return LookaheadState(
            window=jnp.zeros((batch, self.ngram - 1, self.window), jnp.int32),
            filled=jnp.zeros(batch, jnp.int32),
            ngrams=ngram_ring.empty(batch, self.pool, self.ngram),
            node=jnp.zeros((batch, self.nodes), jnp.int32),
            key=jnp.zeros((batch, 2), jnp.uint32),
            temperature=jnp.zeros(batch, jnp.float32),
        )

    def tap(self, output: Output) -> Laws:
        """The tokens among which the target's choice behind each scored node is looked for."""
        return likeliest(output.logits, self.candidates)

    def observe(self, params: Any, state: LookaheadState, committed: Committed) -> LookaheadState:
        """The window moved on, and its n-grams in the pool."""
        c, tree = committed, committed.tree
        if tree is None:
            return state
        window, filled, ngrams = jax.vmap(self._observe)(state, c.taps, tree.valid, c.start, c.length, c.tokens[:, 0])
        return dataclasses.replace(state, window=window, filled=filled, ngrams=ngrams)

    def propose(self, params: Any, state: LookaheadState, context: Context) -> tuple[Draft, LookaheadState]:
        """The window and the pool's n-grams; a row without a window begins one with tokens of its text."""
        window, filled, tree, node = jax.vmap(self._propose)(
            state, context.tokens, context.length, context.room, context.active
        )
        confidence = np.where(np.arange(self.nodes) < self.window_nodes, _WINDOW, _POOLED).astype(np.float32)
        confidence[0] = 1.0
        state = dataclasses.replace(
            state,
            window=window,
            filled=filled,
            node=node,
            key=context.key,
            temperature=context.sampling.temperature.astype(jnp.float32),
        )
        return Draft(tree, jnp.broadcast_to(confidence, tree.tokens.shape)), state

    def insert(self, state: LookaheadState, rows: Int[Array, "r"], other: LookaheadState) -> LookaheadState:
        """Rows replaced."""
        return jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), state, other)

    def release(self, state: LookaheadState, rows: Int[Array, "r"], tokens: Array, length: Array) -> LookaheadState:
        """Rows emptied."""
        return self.insert(state, rows, self.init(None, rows.shape[0], 0))

    def _propose(
        self, state: LookaheadState, text: Array, length: Array, room: Array, active: Array
    ) -> tuple[Array, Array, Tree, Array]:
        """One row's window and its levels in use, its tree, and the node that stands for each node."""
        parent, depth, at = self.shape
        begins = active & (state.filled == 0)
        scattered = np.arange(1, self.window + 1, dtype=np.uint32) * np.uint32(2654435769)
        first = text[(scattered % length.astype(jnp.uint32)).astype(jnp.int32)]
        window = state.window.at[0].set(jnp.where(begins, first, state.window[0]))
        filled = jnp.where(begins, 1, state.filled)

        anchor = text[length - 1]
        found = ngram_ring.starting_with(state.ngrams, anchor, self.guesses)[:, 1:]
        tokens = jnp.concatenate([jnp.zeros(self.window_nodes, jnp.int32).at[at].set(window), found.reshape(-1)])
        level = np.zeros(self.nodes, int)
        level[at] = np.arange(self.ngram - 1)[:, None]
        live = (jnp.asarray(level) < filled) & (tokens >= 0) & (jnp.asarray(depth) < room) & active
        speaker, above = speakers(tokens[1:], jnp.asarray(np.maximum(parent[1:], 0) - 1, jnp.int32), live[1:])
        node = jnp.pad(speaker + 1, (1, 0))
        valid = (live & (node == jnp.arange(self.nodes))).at[0].set(True)
        tree = Tree(
            tokens=jnp.where(valid, tokens, 0).at[0].set(anchor),
            parent=jnp.concatenate([jnp.full(1, -1, jnp.int32), above + 1]),
            valid=valid,
        )
        return window, filled, tree, node

    def _observe(
        self, state: LookaheadState, taps: Laws, scored: Bool[Array, "n"], start: Array, length: Array, anchor: Array
    ) -> tuple[Array, Array, NGrams]:
        """One row's window and its levels in use after a round, and its n-grams."""
        _, depth, at = self.shape
        levels, full = self.ngram - 1, state.filled == self.ngram - 1
        last = jnp.maximum(state.filled - 1, 0)
        leaf = jnp.asarray(at)[last]
        node = state.node[leaf]
        position = start + jnp.asarray(depth)[leaf] + 1
        laws = jax.tree.map(lambda x: x[node], taps)
        choice = jax.vmap(_choice, (0, 0, None, None))(laws, position, state.key, state.temperature)
        known = scored[node] & (choice >= 0) & (length > 0) & (state.filled > 0)
        choice = jnp.where(known, choice, state.window[last])

        written = jnp.concatenate([state.window.at[0, 0].set(anchor), choice[None]]).T
        ngrams = ngram_ring.add(state.ngrams, written, known & full)
        put = jnp.arange(levels)[:, None] == state.filled
        grown = jnp.roll(jnp.where(put, choice, state.window), -length, axis=1)
        moved = jnp.roll(jnp.concatenate([state.window[1:], choice[None]]), 1 - length, axis=1)
        after = jnp.where(full, moved, grown)
        window = jnp.where(known.any(), after, state.window)
        return window, jnp.where(known.any() & ~full, state.filled + 1, state.filled), ngrams


def _choice(law: Laws, position: Array, key: noise.Key, temperature: Array) -> Int[Array, ""]:
    """The target's choice at a position among the tokens of a law's head; NO_TOKEN if there is none."""
    noisy = temperature * noise.gumbel(key, position, jnp.maximum(law.ids, 0))
    return law.ids[jnp.argmax(law.log_probs + noisy)]
