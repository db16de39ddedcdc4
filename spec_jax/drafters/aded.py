"""ADED: a tree search by upper confidence bounds in the laws that the target had behind n-grams (arXiv 2407.12021)."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from spec_jax import noise
from spec_jax.checks import check_sizes
from spec_jax.drafters.law_table import LawTable
from spec_jax.drafters.matches import NO_TOKEN
from spec_jax.drafters.stand import FromLaws
from spec_jax.tree import Draft, Tree


@flax.struct.dataclass
class Search:
    """A row's search tree, `count` nodes of it in use, and of each node's candidates what is known.

    Of a candidate: its token, its chance (0: there is none), the node that stands for it (0: none yet), how many walks
    took it, and the sum of what these were worth. A node's `ends` are the last tokens of its text, its own first.
    """

    count: Int[Array, ""]
    parent: Int[Array, "n"]
    depth: Int[Array, "n"]
    confidence: Float[Array, "n"]
    ends: Int[Array, "n m"]
    ids: Int[Array, "n k"]
    chance: Float[Array, "n k"]
    child: Int[Array, "n k"]
    taken: Float[Array, "n k"]
    worth: Float[Array, "n k"]


@dataclasses.dataclass(frozen=True)
class Aded(FromLaws):
    """Drafts the tree that walks through the laws find, balancing what was good and what was seldom tried.

    A walk begins at the anchor and takes the candidate of the greatest

        Q + explore * P * sqrt(1 + N) / (1 + n),

    of equals the likelier one by the law, until it comes to one that is no node yet, which it adds, or to the end. P is
    the candidate's chance, with the target's own noise as in `Stand`; n of N walks through its parent took it, and Q is
    the mean of what they were worth: the tokens of a walk that will be accepted, as chances have it, of the most that
    could be. Nodes stand in the order in which they were found, so that a controller cuts those found last.

    After the paper's abstract: the bound is PUCT, a walk is worth what it expects where the paper may play it out, and
    the laws are the heads of the target's own, behind up to `longest` tokens, where the paper's matrix has tri-grams.

    Attributes:
        kept: tokens kept of a law.
        explore: weight of what was seldom tried; 0 takes what was best so far.
        walks: walks of a round, at most; they end when the draft is full.
    """

    kept: int = 8
    explore: float = 1.0
    walks: int = 64

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        check_sizes(self, kept=1, walks=self.nodes - 1)
        if self.kept > self.vocab_size:
            raise ValueError(f"kept: got {self.kept}, takes at most vocab_size, which is {self.vocab_size}")
        if not 0 <= self.explore < 1e3:
            raise ValueError(f"explore: got {self.explore!r}, takes a number in [0, 1000)")

    @property
    def width(self) -> int:
        """As many as are kept."""
        return self.kept

    @property
    def depth(self) -> int:
        """The longest root path, of which every node may be one."""
        return min(self.max_depth, self.nodes - 1)

    def _draft(
        self, table: LawTable, last: Array, length: Array, room: Array, key: noise.Key, temperature: Array
    ) -> Draft:
        """One row's draft, behind the tokens `last`, the anchor first."""

        def grown(search: Search, at: Array) -> Search:
            """The search with the candidates behind the node `at`."""
            level = search.depth[at]
            ids, step = self.candidates(table, search.ends[at], length + level, key, temperature)
            inside = (level < self.depth) & (level + 1 < room)
            put = lambda x, y: x.at[at].set(y)  # noqa: E731
            return dataclasses.replace(
                search, ids=put(search.ids, ids), chance=put(search.chance, jnp.where(inside, jnp.exp(step), 0.0))
            )

        def going(carry: tuple[Search, Array]) -> Array:
            search, walks = carry
            return (search.count < self.nodes) & (walks < self.walks) & (search.chance[0] > 0).any()

        def walk(carry: tuple[Search, Array]) -> tuple[Search, Array]:
            search, walks = carry
            search, at, which, added = self._walked(search)
            number = jnp.where(added, search.count, self.nodes)
            end = jnp.concatenate([search.ids[at, which][None], search.ends[at, :-1]])
            put = lambda x, y: x.at[number].set(y, mode="drop")  # noqa: E731
            search = dataclasses.replace(
                search,
                count=search.count + added,
                parent=put(search.parent, at),
                depth=put(search.depth, search.depth[at] + 1),
                confidence=put(search.confidence, search.chance[at, which]),
                ends=put(search.ends, end),
                child=search.child.at[at, which].set(jnp.where(added, number, search.child[at, which])),
            )
            return grown(search, jnp.where(added, number, 0)), walks + 1

        search = lax.while_loop(going, walk, (grown(self._empty(last), jnp.int32(0)), jnp.int32(0)))[0]
        tree = Tree(search.ends[:, 0], search.parent, jnp.arange(self.nodes) < search.count)
        tokens = jnp.where(tree.valid, tree.tokens, 0)
        return Draft(dataclasses.replace(tree, tokens=tokens), search.confidence, proposal="coupled")

    def _empty(self, last: Int[Array, "m"]) -> Search:
        """The anchor alone, nothing known behind it."""
        n, k = self.nodes, self.kept
        zeros, none = jnp.zeros((n, k)), jnp.zeros(n, jnp.int32)
        return Search(
            count=jnp.int32(1),
            parent=none.at[0].set(-1),
            depth=none,
            confidence=jnp.zeros(n).at[0].set(1.0),
            ends=jnp.full((n, self.longest), NO_TOKEN, jnp.int32).at[0].set(last),
            ids=jnp.full((n, k), NO_TOKEN, jnp.int32),
            chance=zeros,
            child=jnp.zeros((n, k), jnp.int32),
            taken=zeros,
            worth=zeros,
        )

    def _walked(self, search: Search) -> tuple[Search, Array, Array, Array]:
        """The search after one more walk: where and by which candidate it ended, and whether that is a node to add."""
        node, going = jnp.int32(0), jnp.bool_(True)
        at, which, added = jnp.int32(0), jnp.int32(0), jnp.bool_(False)
        product, tokens, steps = jnp.float32(1), jnp.float32(0), []
        for _ in range(self.depth):
            n, chance = search.taken[node], search.chance[node]
            mean = search.worth[node] / jnp.maximum(n, 1)
            bound = mean + self.explore * chance * jnp.sqrt(1 + n.sum()) / (1 + n)
            best = jnp.argmax(jnp.where(chance > 0, bound, -jnp.inf)).astype(jnp.int32)
            takes = going & (chance[best] > 0)
            product = jnp.where(takes, product * chance[best], product)
            tokens = tokens + jnp.where(takes, product, 0.0)
            steps.append((jnp.where(takes, node, self.nodes), best))
            at, which = jnp.where(takes, node, at), jnp.where(takes, best, which)
            below = search.child[node, best]
            added = added | (takes & (below == 0))
            going = takes & (below > 0)
            node = jnp.where(going, below, node)
        nodes, picked = (jnp.stack(x) for x in zip(*steps, strict=True))
        taken = search.taken.at[nodes, picked].add(1.0, mode="drop")
        worth = search.worth.at[nodes, picked].add(tokens / self.depth, mode="drop")
        return dataclasses.replace(search, taken=taken, worth=worth), at, which, added
