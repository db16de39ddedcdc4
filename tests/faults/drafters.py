"""Drafters with chosen tokens, chosen accept counts and chosen laws."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from spec_jax import noise
from spec_jax.drafters.drafter import Committed, Context, Stateless
from spec_jax.models.target import Output
from spec_jax.tree import Draft, Law, Proposal, Tree


@flax.struct.dataclass
class Plan:
    """text [B, L]: what the target will say; counts [B, R]: how many tokens are right in each round; length [B]."""

    text: Array
    counts: Array
    length: Array


@flax.struct.dataclass
class FollowState:
    """Rounds so far, and the tapped feature (the audit hash) of every token committed by a verdict; -1 elsewhere."""

    round: Array
    hashes: Array


@dataclasses.dataclass(frozen=True)
class Follow:
    """A chain along a known text, wrong at one place: behind the first counts[round] tokens."""

    k: int
    vocab_size: int

    @property
    def nodes(self) -> int:
        return self.k + 1

    @property
    def depth(self) -> int:
        return self.k

    def init(self, params: Any, batch: int, max_len: int) -> FollowState:
        return FollowState(jnp.zeros(batch, jnp.int32), jnp.full((batch, max_len), -1))

    def tap(self, output: Output) -> Any:
        return output.features

    def observe(self, params: Any, state: FollowState, committed: Committed) -> FollowState:
        if committed.tree is None:
            return state
        hashes = state.hashes
        if committed.taps is not None:
            found = jnp.take_along_axis(committed.taps[..., 0], committed.path, axis=1)
            offset = jnp.arange(committed.path.shape[1])
            at = jnp.where(offset < committed.length[:, None], committed.start[:, None] + offset, hashes.shape[1])
            hashes = jax.vmap(lambda h, i, x: h.at[i].set(x, mode="drop"))(hashes, at, found)
        return FollowState(state.round + 1, hashes)

    def propose(self, params: Plan, state: FollowState, context: Context) -> tuple[Draft, FollowState]:
        def one(text, counts, drafted, n, anchor, length):
            offset = jnp.arange(self.k)
            tokens = text.at[length + offset].get(mode="fill", fill_value=0)
            tokens = jnp.where(offset == counts[n % counts.shape[0]], (tokens + 1) % self.vocab_size, tokens)
            valid = jnp.arange(self.k + 1) <= drafted
            return Tree(jnp.concatenate([anchor[None], tokens]), jnp.arange(-1, self.k), valid)

        c = context
        tree = jax.vmap(one)(params.text, params.counts, params.length, state.round, c.anchor, c.length)
        return Draft(tree, jnp.ones(tree.tokens.shape)), state

    def insert(self, state: FollowState, rows: Array, other: FollowState) -> FollowState:
        return jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), state, other)

    def release(self, state: FollowState, rows: Array, tokens: Array, length: Array) -> FollowState:
        return FollowState(state.round.at[rows].set(0, mode="drop"), state.hashes.at[rows].set(-1, mode="drop"))


@flax.struct.dataclass
class Guess:
    """Tables of log-probs by last token, [V, V] or [B, V, V]: what tokens are drawn from, and what the draft says.

    length: deepest node; noise: an index into NOISES; tag: told to the rule.
    """

    drawn: Array
    said: Array
    length: Array
    noise: Array
    tag: Array


@flax.struct.dataclass
class TaggedLaw(Law):
    """A law with a number for a rule that has faults to choose from."""

    tag: Any = None


NOISES = ("own", "residual", "acceptance")


@dataclasses.dataclass(frozen=True)
class TableDrafter(Stateless):
    """A tree of fixed shape from a table: siblings are ranks ("point", "coupled") or independent draws ("sampled")."""

    parents: tuple[int, ...]
    mode: Proposal

    @property
    def nodes(self) -> int:
        return len(self.parents)

    @property
    def depth(self) -> int:
        return max(self._depths)

    @property
    def _depths(self) -> list[int]:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    def propose(self, params: Guess, state: tuple[()], context: Context) -> tuple[Draft, tuple[()]]:
        c, table = context, params.drawn

        def one(drawn, said, anchor, length, key):
            tokens, laws = [anchor], [jnp.zeros(table.shape[-1])]
            for i, parent in enumerate(self.parents[1:], 1):
                rank = self.parents[:i].count(parent)
                at = length + self._depths[parent]
                tokens.append(self._pick(drawn[tokens[parent]], params.noise, key, at, i, rank).astype(jnp.int32))
                laws.append(said[tokens[parent]])
            valid = jnp.asarray(self._depths) <= params.length
            return Tree(jnp.stack(tokens), jnp.asarray(self.parents), valid), jnp.stack(laws)

        by_row = 0 if table.ndim == 3 else None
        tree, laws = jax.vmap(one, (by_row, by_row, 0, 0, 0))(table, params.said, c.anchor, c.length, c.key)
        tag = jnp.broadcast_to(params.tag, (*laws.shape[:2], 1))
        law = TaggedLaw(laws, None, tag) if self.mode == "sampled" else None
        return Draft(tree, jnp.ones(tree.tokens.shape), law, self.mode), state

    def _pick(self, log_law: Array, kind: Array, key: Array, position: Array, node: int, rank: int) -> Array:
        ids = jnp.arange(log_law.shape[0])
        if self.mode != "sampled":
            gumbel = noise.gumbel(key, position, ids) if self.mode == "coupled" else 0.0
            return jnp.argsort(-(log_law + gumbel), stable=True)[rank]
        own = log_law + noise.gumbel(noise.stream(key, "draft"), position, ids + node * ids.shape[0])
        residual = log_law + noise.gumbel(noise.stream(key, "residual"), position, ids)
        u = noise.uniform(noise.stream(key, "accept"), position, jnp.int32(node))
        inverse = jnp.searchsorted(jnp.cumsum(jnp.exp(log_law)), u)
        return jnp.stack([own.argmax(), residual.argmax(), inverse])[kind]
