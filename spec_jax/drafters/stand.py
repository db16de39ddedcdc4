"""Trees from the laws that the target had behind the same n-grams, and STAND, which draws them (arXiv 2506.04708)."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spec_jax import noise
from spec_jax.checks import check_sizes
from spec_jax.drafters import law_table
from spec_jax.drafters.checks import check_rates
from spec_jax.drafters.drafter import Committed, Context
from spec_jax.drafters.law_table import LawTable
from spec_jax.drafters.laws import Laws, likeliest
from spec_jax.drafters.matches import NO_TOKEN
from spec_jax.models.target import Output
from spec_jax.topology import static
from spec_jax.topology.coupling import Candidates, log_chance
from spec_jax.topology.pool import Pool, best
from spec_jax.topology.static import Template
from spec_jax.tree import Draft


@flax.struct.dataclass
class StandState:
    """The batch's table, and the tokens before each row's anchor, latest first (NO_TOKEN: before the text)."""

    table: LawTable
    before: Int[Array, "b n"]


@dataclasses.dataclass(frozen=True)
class FromLaws(abc.ABC):
    """Drafts from the laws that the target had behind the longest n-gram that ends a text; subclasses say which tree.

    Every node that the target scores, accepted or not, renews the laws behind its last 1 .. `longest` tokens, at
    temperature 1 and without the rows' truncation and penalties; prefill renews none. The table is shared by all rows
    and stays when rows go.

    Attributes:
        vocab_size: the target's number of token ids.
        nodes: nodes of a draft, the anchor among them.
        max_depth: longest root path.
        longest: tokens of the longest n-gram.
        entries: n-grams that the table has room for.
        most: laws of one n-gram that count alike; earlier ones fade.
        a, b: weights of law and noise.
    """

    vocab_size: int
    nodes: int = 32
    max_depth: int = 6
    longest: int = 3
    entries: int = 1 << 16
    most: int = 8
    a: float = 1.0
    b: float = 1.0

    def __post_init__(self) -> None:
        """Check the settings."""
        check_sizes(self, vocab_size=1, nodes=2, max_depth=1, longest=1, entries=1, most=1)
        for name in ("a", "b"):
            if not 0 <= getattr(self, name) < 1e3:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, takes a number in [0, 1000)")

    @property
    @abc.abstractmethod
    def width(self) -> int:
        """Tokens kept of a law."""

    @abc.abstractmethod
    def _draft(
        self, table: LawTable, last: Array, length: Array, room: Array, key: noise.Key, temperature: Array
    ) -> Draft:
        """One row's draft, behind the tokens `last`, the anchor first."""

    def init(self, params: Any, batch: int, max_len: int) -> StandState:
        """No law known."""
        before = jnp.full((batch, self.longest - 1), NO_TOKEN, jnp.int32)
        return StandState(law_table.empty(self.entries, self.width), before)

    def tap(self, output: Output) -> Laws:
        """The law behind every scored node."""
        return likeliest(output.logits, self.width)

    def observe(self, params: Any, state: StandState, committed: Committed) -> StandState:
        """The table renewed by the nodes scored in this round; those on an accepted path win over rejected ones."""
        c, n = committed, state.before.shape[1]
        text = jnp.concatenate([state.before[:, ::-1], c.tokens], axis=1)
        before = jnp.take_along_axis(text, c.length[:, None] + jnp.arange(n)[::-1], axis=1)
        if c.tree is None:
            return StandState(state.table, before)
        walked = c.walked(c.tree.tokens.shape[1])
        rank = jnp.where(c.tree.valid & (c.length > 0)[:, None], walked.astype(jnp.int32), -1)
        last = jax.vmap(_ends)(c.tree.tokens, c.tree.parent, state.before)
        flat = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
        last, laws, rank = jax.tree.map(flat, (last, c.taps, rank))
        return StandState(law_table.renew(state.table, last, laws, rank, self.most), before)

    def propose(self, params: Any, state: StandState, context: Context) -> tuple[Draft, StandState]:
        """Each row's draft; the anchor alone where no law is known behind it."""
        at = context.length[:, None] - 1 - jnp.arange(self.longest)
        last = jnp.take_along_axis(context.tokens, jnp.maximum(at, 0), axis=1)
        last = jnp.where(at < 0, NO_TOKEN, last)
        room = jnp.where(context.active, context.room, 0)
        grow = jax.vmap(functools.partial(self._draft, state.table))
        return grow(last, context.length, room, context.key, context.sampling.temperature), state

    def insert(self, state: StandState, rows: Int[Array, "r"], other: StandState) -> StandState:
        """The table is the batch's; that of the other state is left behind."""
        return dataclasses.replace(state, before=state.before.at[rows].set(other.before, mode="drop"))

    def release(self, state: StandState, rows: Int[Array, "r"], tokens: Array, length: Array) -> StandState:
        """The table stays."""
        return dataclasses.replace(state, before=state.before.at[rows].set(NO_TOKEN, mode="drop"))

    def candidates(
        self, table: LawTable, end: Array, position: Array, key: noise.Key, temperature: Array
    ) -> tuple[Int[Array, "k"], Float[Array, "k"]]:
        """The tokens of the law behind a text's end, given latest first, and the log-chances that they are chosen."""
        laws = law_table.find(table, end)
        noisy = temperature * noise.gumbel(key, position, jnp.maximum(laws.ids, 0))
        found = Candidates(laws.ids, laws.log_probs, noisy)
        return laws.ids, log_chance(found, jnp.float32(self.a), jnp.float32(self.b))


@dataclasses.dataclass(frozen=True)
class Stand(FromLaws):
    """Drafts by the laws that the target had behind the longest n-gram that ends the text; verify with `match`.

    The paper draws siblings without replacement, by adding Gumbel noise to the log-probs and taking the greatest
    (Gumbel-top-k). Here the noise is that which the target will choose with: a child of rank r is the r-th of
    a log q + b T G (see `topology.coupling`), so that sampled text is drafted for nearly as well as greedy text. After
    the paper's abstract: that a law is the mean of those seen, and how it fades, are our reading.

    The candidates are a fixed tree of `offered` nodes, the likeliest of its size (see `topology.static.likeliest`), of
    which the draft is the likeliest part by the chances of its tokens.

    Attributes:
        rates: for each rank, the chance that a node is accepted if its parent is, descending; their number is that of
            the tokens kept of a law. They make the tree of candidates.
        offered: nodes of the tree of candidates, whose depth is the number of look-ups one after another.
    """

    rates: tuple[float, ...] = (0.55, 0.10, 0.05, 0.03, 0.02, 0.02, 0.01, 0.01)
    offered: int = 64

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        check_sizes(self, offered=self.nodes)
        check_rates(self.rates, self.vocab_size)
        if self.template.nodes < self.nodes:
            what = f"as many as {len(self.rates)} tokens give down to depth {self.max_depth}"
            raise ValueError(f"nodes: got {self.nodes}, takes at most {self.template.nodes}, {what}")

    @functools.cached_property
    def template(self) -> Template:
        """The tree of candidates."""
        return static.likeliest(self.rates, self.offered, self.max_depth)

    @property
    def depth(self) -> int:
        """Depth of the tree of candidates."""
        return self.template.depth

    @property
    def width(self) -> int:
        """As many as there are rates."""
        return len(self.rates)

    def _draft(
        self, table: LawTable, last: Array, length: Array, room: Array, key: noise.Key, temperature: Array
    ) -> Draft:
        """One row's draft, behind the tokens `last`, the anchor first."""
        parent, rank, depths = (np.asarray(x) for x in (self.template.parent, self.template.rank, self.template.depths))
        size = self.template.nodes
        ends = jnp.full((size, self.longest), NO_TOKEN, jnp.int32).at[0].set(last)
        chance = jnp.full(size, -jnp.inf).at[0].set(0.0)
        for level in range(1, self.depth + 1):
            here = np.flatnonzero(depths == level)
            above, of = np.unique(parent[here], return_inverse=True)
            behind = lambda end: self.candidates(table, end, length + level - 1, key, temperature)  # noqa: E731, B023
            ids, step = jax.vmap(behind)(ends[above])
            order = jnp.argsort(-step, axis=1, stable=True)
            picked = order[of, rank[here]]
            step = jnp.where(level < room, step[of, picked], -jnp.inf)
            ends = ends.at[here].set(jnp.concatenate([ids[of, picked][:, None], ends[parent[here], :-1]], axis=1))
            chance = chance.at[here].set(chance[parent[here]] + jnp.minimum(step, 0.0))
        pool = Pool(ends[1:, 0], jnp.asarray(parent[1:] - 1, jnp.int32), chance[1:])
        return dataclasses.replace(best(pool, last[0], self.nodes), proposal="coupled")


def _ends(tokens: Int[Array, "n"], parent: Int[Array, "n"], before: Int[Array, "l"]) -> Int[Array, "n m"]:
    """The last len(before) + 1 tokens of every node's text, its own first; `before` are those before the root's."""
    at, outside, found = jnp.arange(tokens.shape[0]), jnp.full(tokens.shape[0], -1), []
    for _ in range(before.shape[0] + 1):
        inside = at >= 0
        found.append(jnp.where(inside, tokens[jnp.maximum(at, 0)], jnp.append(before, NO_TOKEN)[outside]))
        at = jnp.where(inside, parent[jnp.maximum(at, 0)], at)
        outside = jnp.where(at < 0, outside + 1, outside)
    return jnp.stack(found, axis=1)
