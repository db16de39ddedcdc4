"""KNN-SSD (arXiv 2505.16162): a bank of sets of skipped layers, one for each domain of prompts; the nearest is used."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax.checks import check_sizes
from spec_jax.drafters.drafter import Committed, Context
from spec_jax.drafters.skipping.clasp import cosine
from spec_jax.drafters.skipping.swift import Swift, SwiftState
from spec_jax.models.llama import Llama
from spec_jax.models.target import Output


@flax.struct.dataclass
class KnnState:
    """The bank, its first `used` domains in use: each one's centre and search; each row's prompt, if it has any."""

    centre: Float[Array, "n hidden"]
    searches: SwiftState
    used: Int[Array, ""]
    prompt: Float[Array, "b hidden"]
    known: Bool[Array, "b"]


@dataclasses.dataclass(frozen=True)
class Knn:
    """Drafts with the layers that were found for the domain of the prompt, searched for as `search` does.

    A prompt stands for itself by the hidden state of its last token in the target's state, and its domain is that of
    the nearest centre by cosine. A prompt that is near none begins a domain while there is room, and is its centre.
    Only the text of a domain's own rows tries sets for it.

    After the paper's abstract. There the bank is filled beforehand, from samples of known domains; here it is filled by
    decoding, so that prompts of each domain, run once, are the same, and the bank stays when rows go. One set serves
    the batch, as ever: that of the domain of most running rows, of equals the one found first.

    Attributes:
        search: how each domain's set is found.
        domains: most domains.
        near: the least cosine of a prompt and its domain's centre while there is room for another.
    """

    search: Swift
    domains: int = 8
    near: float = 0.9

    def __post_init__(self) -> None:
        """Check the settings."""
        check_sizes(self, domains=1)
        if not -1 <= self.near <= 1:
            raise ValueError(f"near: got {self.near!r}, takes a cosine, -1 .. 1")

    def check(self, layers: int) -> None:
        """ValueError for a model that can't lose so many layers."""
        self.search.check(layers)

    def init(self, model: Llama, params: Any, batch: int) -> KnnState:
        """No domains."""
        size, dtype = model.config.hidden_size, params.embedding.dtype
        each = self.search.init(model, params, batch)
        searches = jax.tree.map(lambda x: jnp.repeat(x[None], self.domains, axis=0), each)
        blank = lambda n: jnp.zeros((n, size), dtype)  # noqa: E731
        return KnnState(blank(self.domains), searches, jnp.int32(0), blank(batch), jnp.zeros(batch, bool))

    def tap(self, output: Output) -> None:
        """What is known of a prompt comes with its prefill."""

    def observe(self, state: KnnState, committed: Committed) -> KnnState:
        """The last hidden state of a prefill chunk; a verdict tells nothing. Raises ValueError for a target without."""
        if committed.tree is not None:
            return state
        features, moved = committed.taps, committed.length > 0
        if features is None or features.shape[2] != 1:
            raise ValueError("target: got one without the tap of its last layer alone, takes `knn.taps(target)`")
        last = jax.vmap(lambda x, n: x[jnp.maximum(n - 1, 0), 0])(features, committed.length)
        prompt = jnp.where(moved[:, None], last.astype(state.prompt.dtype), state.prompt)
        return dataclasses.replace(state, prompt=prompt, known=state.known | moved)

    def choose(self, model: Llama, params: Any, state: KnnState, context: Context) -> tuple[Array, KnnState]:
        """The set of the batch's domain, after one more was tried for it if its search goes on."""
        voters = state.known & context.active
        state = self.opened(state, voters)
        domain = nearest(state, state.prompt)[0]
        votes = jnp.zeros(self.domains, jnp.int32).at[domain].add(voters)
        at = jnp.argmax(votes)
        own = jax.tree.map(lambda x: x[at], state.searches)
        rows = dataclasses.replace(context, active=voters & (domain == at))
        keep, own = self.search.choose(model, params, own, rows)
        searches = jax.tree.map(lambda x, y: x.at[at].set(y), state.searches, own)
        return keep, dataclasses.replace(state, searches=searches)

    def opened(self, state: KnnState, voters: Bool[Array, "b"]) -> KnnState:
        """The state with a domain for the first of the rows that is near none; a round opens one at most."""
        strange = voters & (nearest(state, state.prompt)[1] < self.near)
        opens = strange.any() & (state.used < self.domains)
        at = jnp.where(opens, state.used, self.domains)
        centre = state.centre.at[at].set(state.prompt[jnp.argmax(strange)], mode="drop")
        return dataclasses.replace(state, centre=centre, used=state.used + opens)

    def insert(self, state: KnnState, rows: Int[Array, "r"], other: KnnState) -> KnnState:
        """Rows' prompts replaced; the bank stays that of `state`."""
        put = lambda x, y: x.at[rows].set(y, mode="drop")  # noqa: E731
        return dataclasses.replace(state, prompt=put(state.prompt, other.prompt), known=put(state.known, other.known))


def taps(target: Llama) -> Llama:
    """The target with the tap that tells prompts apart: its last layer."""
    return dataclasses.replace(target, taps=(target.config.num_layers,))


def nearest(state: KnnState, prompt: Float[Array, "b hidden"]) -> tuple[Int[Array, "b"], Float[Array, "b"]]:
    """Each prompt's nearest domain in use and their cosine, of equals the first; (0, -inf) where there is none."""
    near = cosine(prompt[:, None], state.centre)
    near = jnp.where(jnp.arange(state.centre.shape[0]) < state.used, near, -jnp.inf)
    return jnp.argmax(near, axis=1).astype(jnp.int32), near.max(axis=1)
