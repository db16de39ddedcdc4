"""SWIFT (arXiv 2410.06916): sets of skipped layers, tried on the text just written; random, or by what was learned."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from spec_jax.checks import check_sizes
from spec_jax.drafters.drafter import Committed, Context
from spec_jax.drafters.skipping.drafter import check_skips, spread
from spec_jax.models import views
from spec_jax.models.llama import Llama
from spec_jax.models.target import Output
from spec_jax.tree import Tree

_NOISE = 1e-2


@flax.struct.dataclass
class SwiftState:
    """The best set and its score (-1: none was tried), the last sets tried and theirs, and how the search stands.

    Of several searches, all have an axis for them in front.
    """

    keep: Bool[Array, "*n l"]
    best: Float[Array, "*n"]
    tried: Bool[Array, "*n s l"]
    scores: Float[Array, "*n s"]
    count: Int[Array, "*n"]
    stale: Int[Array, "*n"]
    key: UInt32[Array, "*n 2"]


@dataclasses.dataclass(frozen=True)
class Swift:
    """Tries one set a round on the tokens just written, and drafts with the best so far, until that is good enough.

    A set's score is the share of those tokens that the model with it would have chosen greedily (the paper's
    matchness), which takes one pass of the kept layers over them. Most sets are random, all of one size with the first
    and the last layer kept; every `learned`-th is the best of `pool` random ones by expected improvement over a
    Gaussian process on the sets tried: the paper's Bayesian optimisation, simpler. The paper chooses among attention
    and MLP halves of layers; here a layer is whole. The search is the batch's, over all its rows.

    Attributes:
        skips: how many layers are skipped; the paper's share of them is 0.45.
        window: tokens that a set is tried on; a row that has not written as many is left out.
        learned: how often a set is chosen by what was learned.
        pool: sets that are compared for that.
        memory: sets remembered.
        most: sets tried at most.
        patience: the search ends when so many did not improve on the best.
        enough: it ends at this score too.
        seed: of the random sets.
    """

    skips: int
    window: int = 32
    learned: int = 25
    pool: int = 64
    memory: int = 64
    most: int = 1000
    patience: int = 300
    enough: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the settings."""
        check_sizes(self, window=1, learned=1, pool=1, memory=1, most=1, patience=1)
        if not 0 < self.enough <= 1:
            raise ValueError(f"enough: got {self.enough!r}, takes a number in (0, 1]")

    def check(self, layers: int) -> None:
        """ValueError for a model that can't lose so many layers."""
        check_skips(self.skips, layers)

    def init(self, model: Llama, params: Any, batch: int) -> SwiftState:
        """Evenly spread layers, nothing tried."""
        count = model.config.num_layers
        return SwiftState(
            keep=jnp.asarray(spread(count, self.skips)),
            best=jnp.float32(-1),
            tried=jnp.ones((self.memory, count), bool),
            scores=jnp.zeros(self.memory),
            count=jnp.int32(0),
            stale=jnp.int32(0),
            key=jax.random.key_data(jax.random.key(self.seed, impl="threefry2x32")),
        )

    def tap(self, output: Output) -> None:
        """The target's outputs are not needed."""

    def observe(self, state: SwiftState, committed: Committed) -> SwiftState:
        """The text that `choose` is given is all that is needed."""
        return state

    def choose(self, model: Llama, params: Any, state: SwiftState, context: Context) -> tuple[Array, SwiftState]:
        """The best set, after one more was tried if the search goes on."""
        rows = context.active & (context.length - context.prompt_length >= self.window)
        goes_on = (state.best < self.enough) & (state.count < self.most) & (state.stale < self.patience) & rows.any()

        def attempt() -> SwiftState:
            keep, after = self.candidate(state)
            return self.told(after, keep, matchness(model, params, keep, context, rows, self.window))

        state = lax.cond(goes_on, attempt, lambda: state)
        return state.keep, state

    def candidate(self, state: SwiftState) -> tuple[Bool[Array, "l"], SwiftState]:
        """The set to try next; the first is the one to begin with. Its key has moved on in the state."""
        key = jax.random.wrap_key_data(state.key, impl="threefry2x32")
        key, own = jax.random.split(key)
        sets = random_sets(own, self.pool, state.keep.shape[0], self.skips)

        def learned() -> Array:
            seen = jnp.arange(self.memory) < state.count
            return sets[jnp.argmax(improvement(state.tried, state.scores, seen, sets, state.best))]

        keep = lax.cond(state.count % self.learned == self.learned - 1, learned, lambda: sets[0])
        keep = jnp.where(state.count == 0, state.keep, keep)
        return keep, dataclasses.replace(state, key=jax.random.key_data(key))

    def told(self, state: SwiftState, keep: Bool[Array, "l"], score: Float[Array, ""]) -> SwiftState:
        """The state after a set was tried."""
        at, better = state.count % self.memory, score > state.best
        return dataclasses.replace(
            state,
            keep=jnp.where(better, keep, state.keep),
            best=jnp.maximum(score, state.best),
            tried=state.tried.at[at].set(keep),
            scores=state.scores.at[at].set(score),
            count=state.count + 1,
            stale=jnp.where(better, 0, state.stale + 1),
        )

    def insert(self, state: SwiftState, rows: Int[Array, "r"], other: SwiftState) -> SwiftState:
        """The search stays that of the batch."""
        return state


def matchness(
    model: Llama, params: Any, keep: Bool[Array, "l"], context: Context, rows: Bool[Array, "b"], window: int
) -> Float[Array, ""]:
    """The share of the last `window` tokens of `rows` that the model with the kept layers chooses greedily.

    One pass over the tokens, each with those before it as read by the kept layers, and the text before all of them as
    the target's own state has it.
    """
    at = jnp.maximum(context.length - 1 - window, 0)[:, None] + jnp.arange(window)
    text = lambda at: jnp.take_along_axis(context.tokens, jnp.minimum(at, context.tokens.shape[1] - 1), axis=1)  # noqa: E731
    parent = jnp.broadcast_to(jnp.arange(-1, window - 1, dtype=jnp.int32), at.shape)
    before = dataclasses.replace(context.target, length=at[:, 0])
    output, _, _ = model.score(views.masked(params, keep), before, Tree(text(at), parent, jnp.ones(at.shape, bool)))
    right = (output.logits.argmax(-1) == text(at + 1)) & rows[:, None]
    return right.sum() / jnp.maximum(rows.sum() * window, 1).astype(jnp.float32)


def random_sets(key: Array, count: int, layers: int, skips: int) -> Bool[Array, "n l"]:
    """Sets of kept layers, all but `skips` of them, the first and the last among them."""
    u = jax.random.uniform(key, (count, layers)).at[:, jnp.array([0, -1])].set(2.0)
    return jnp.argsort(jnp.argsort(u, axis=1), axis=1) >= skips


def improvement(
    tried: Bool[Array, "s l"],
    scores: Float[Array, "s"],
    seen: Bool[Array, "s"],
    sets: Bool[Array, "n l"],
    best: Float[Array, ""],
) -> Float[Array, "n"]:
    """By how much each set is expected to beat `best`, by a Gaussian process over the sets that were `seen`.

    Its kernel is exp(-d / m), where d counts the layers that one of two sets skips and the other keeps, and m those
    that a set skips; scores are taken relative to their mean, in units of their spread.
    """
    skipped = jnp.maximum((~sets).sum(1).mean(), 1.0)
    kernel = lambda a, b: jnp.exp(-(a[:, None] != b[None]).sum(-1) / skipped)  # noqa: E731
    n = jnp.maximum(seen.sum(), 1)
    mean = jnp.where(seen, scores, 0).sum() / n
    spread = jnp.sqrt(jnp.where(seen, (scores - mean) ** 2, 0).sum() / n) + 1e-3
    y = jnp.where(seen, (scores - mean) / spread, 0)
    both = seen[:, None] & seen
    gram = jnp.where(both, kernel(tried, tried), 0) + jnp.diag(jnp.where(seen, _NOISE, 1.0))
    cross = jnp.where(seen, kernel(sets, tried), 0)
    solved = jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(gram), jnp.column_stack([y, cross.T]))
    mu = cross @ solved[:, 0]
    sigma = jnp.sqrt(jnp.maximum(1 - (cross * solved[:, 1:].T).sum(1), 1e-6))
    z = (mu - (best - mean) / spread) / sigma
    return spread * sigma * (z * jax.scipy.stats.norm.cdf(z) + jax.scipy.stats.norm.pdf(z))
