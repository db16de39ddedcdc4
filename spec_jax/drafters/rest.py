"""REST: draft what followed the text's end in a corpus, found by binary search in a suffix array (arXiv 2311.08252)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from spec_jax.checks import check_sizes
from spec_jax.drafters import matches, trie
from spec_jax.drafters.drafter import Context, Stateless
from spec_jax.tree import Draft

_GREATEST = 2**31 - 1


@flax.struct.dataclass
class Store:
    """Documents, each with NO_TOKEN behind it, and all places in the order of what stands from there on."""

    tokens: Int[Array, "s"]
    order: Int[Array, "s"]


def build_store(documents: Sequence[Sequence[int]], compared: int = 64) -> Store:
    """The store of a corpus: its suffix array by prefix doubling, on the host.

    Places are told apart by the `compared` tokens from there on; a drafter's longest + depth is enough.

    Raises:
        ValueError: for no token at all, a negative one, 2**31 places or more, or compared < 1.
    """
    if not isinstance(compared, int) or compared < 1:
        raise ValueError(f"compared: got {compared!r}, takes an integer of at least 1")
    for i, document in enumerate(documents):
        if len(document) and not np.issubdtype(np.asarray(document).dtype, np.integer):
            raise ValueError(f"documents[{i}]: got {np.asarray(document).dtype}, takes token ids")
    ended = [np.append(np.asarray(document, np.int64).reshape(-1), matches.NO_TOKEN) for document in documents]
    tokens = np.concatenate(ended) if ended else np.zeros(0, np.int64)
    size, wrong = tokens.size, (tokens < 0).sum() - len(ended)
    if size == len(ended) or wrong or tokens.max() >= _GREATEST:
        raise ValueError(
            f"documents: got {size - len(ended)} tokens, {wrong} of them negative, takes ids below 2**31 - 1"
        )
    if size > _GREATEST:
        raise ValueError(f"documents: got {size} places, takes at most 2**31 - 1")
    rank, width = np.unique(tokens, return_inverse=True)[1].astype(np.int64), 1
    while width < compared and rank.max() + 1 < size:
        behind = np.concatenate([rank[width:] + 1, np.zeros(min(width, size), np.int64)])[:size]
        rank, width = np.unique(rank * (size + 1) + behind, return_inverse=True)[1].astype(np.int64), 2 * width
    order = np.argsort(rank, kind="stable")
    return Store(jnp.asarray(tokens, jnp.int32), jnp.asarray(order, jnp.int32))


@dataclasses.dataclass(frozen=True)
class Rest(Stateless):
    """Drafts the continuations of the longest end of the text that the corpus has; its parameters are a `Store`.

    Of the places where the longest match occurs, `matches` are taken at even distances in the order of what follows
    them, so that a continuation is among them as often as it is in the corpus. Merged, the most frequent prefixes are
    the draft (see `trie.merge`, which gives the confidence). The search takes log2(size) steps, all lengths at once.

    Attributes:
        nodes: nodes of a draft, the anchor among them.
        matches: places whose continuations are merged.
        longest: longest match that is looked for.
        k: most tokens of a continuation.
    """

    nodes: int = 64
    matches: int = 32
    longest: int = 16
    k: int = 10

    def __post_init__(self) -> None:
        """Check the settings."""
        check_sizes(self, nodes=2, matches=1, longest=1, k=1)

    @property
    def depth(self) -> int:
        """A draft can be one chain."""
        return min(self.k, self.nodes - 1)

    def init(self, params: Any, batch: int, max_len: int) -> tuple[()]:
        """No state. Raises ValueError where the parameters are no store."""
        if not isinstance(params, Store):
            raise ValueError(f"drafter_params: got {type(params).__name__}, takes a Store (rest.build_store)")
        return ()

    def propose(self, params: Store, state: tuple[()], context: Context) -> tuple[Draft, tuple[()]]:
        """The merged continuations; the anchor alone where the last token is not in the corpus."""

        def row(tokens, length, room):
            found, following = self._candidates(params, tokens, length)
            following = jnp.where(jnp.arange(1, self.depth + 1) < room, following, matches.NO_TOKEN)
            return trie.merge(tokens[length - 1], following, found, self.nodes)

        room = jnp.where(context.active, context.room, 0)
        tree, confidence = jax.vmap(row)(context.tokens, context.length, room)
        return Draft(tree, confidence), state

    def _candidates(self, store: Store, tokens: Array, length: Array) -> tuple[Array, Array]:
        """The match length of up to `matches` places (0: none), and the tokens behind them, up to any NO_TOKEN."""
        size = jnp.arange(1, self.longest + 1)
        first, last = jax.vmap(lambda n: _places(store, tokens, length, n, self.longest))(size)
        n = jnp.max(jnp.where((first < last) & (size <= length), size, 0))
        first, last = first[jnp.maximum(n - 1, 0)], last[jnp.maximum(n - 1, 0)]
        count = jnp.where(n > 0, last - first, 0)
        i, c = jnp.arange(self.matches), self.matches
        spread = i * (count // c) + i * (count % c) // c + count // (2 * c)
        place = first + jnp.where(count < c, i, spread)
        at = store.order.at[place].get(mode="fill", fill_value=0)
        following = jax.vmap(lambda at: _from(store, at + n, self.depth))(at)
        return jnp.where(i < count, n, 0), following


def _from(store: Store, at: Int[Array, ""], k: int) -> Int[Array, "k"]:
    """k tokens from a place on."""
    return store.tokens.at[at + jnp.arange(k)].get(mode="fill", fill_value=matches.NO_TOKEN)


def _places(
    store: Store, tokens: Array, length: Array, n: Array, longest: int
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """The range of `order` that begins with the last n tokens of tokens[:length] and does not end there."""
    index = jnp.arange(longest + 1)
    key = tokens[jnp.clip(length - n + index, 0, tokens.shape[0] - 1)]
    bound = lambda behind: _first_not_below(store, jnp.where(index < n, key, behind), n + 1)  # noqa: E731
    return bound(0), bound(_GREATEST)


def _first_not_below(store: Store, key: Int[Array, "m"], n: Int[Array, ""]) -> Int[Array, ""]:
    """The first index of `order` whose place's first n tokens are not below key[:n]."""
    size, used = store.order.shape[0], jnp.arange(key.shape[0]) < n

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        there = _from(store, store.order[jnp.minimum(middle, size - 1)], key.shape[0])
        differs = used & (there != key)
        at = jnp.argmax(differs)
        below = differs.any() & (there[at] < key[at]) & (low < high)
        return jnp.where(below, middle + 1, low), jnp.where(below | (low >= high), high, middle)

    return lax.fori_loop(0, size.bit_length(), halve, (jnp.int32(0), jnp.int32(size)))[0]
