"""Which of several drafters drafts next: learned from what became of their drafts, as functions over arrays.

A reward is the accepted share of the most tokens that a draft can bring, 0 .. 1. A bandit is told that of the drafter
that drafted; with full information, that of all.
"""

from __future__ import annotations

import abc
import dataclasses
import math

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


@flax.struct.dataclass
class Means:
    """How often each arm was played, and the sum of its rewards."""

    count: Float[Array, "k"]
    total: Float[Array, "k"]


@flax.struct.dataclass
class Weights:
    """Each arm's estimated loss so far, the rounds that were played, and the key of the next draw."""

    loss: Float[Array, "k"]
    rounds: Int[Array, ""]
    key: UInt32[Array, "2"]


@dataclasses.dataclass(frozen=True)
class Ucb:
    """UCBSpec (BanditSpec, arXiv 2505.15141): the arm with the greatest upper confidence bound; after its abstract.

    The bound is UCB1's, mean + width * sqrt(2 log t / n) behind t rounds, n of them the arm's; the paper's own radius
    may be another. Every arm is played once first.

    Attributes:
        width: how much the bound is above the mean; 1 is UCB1's, less explores less.
    """

    width: float = 1.0

    full = False

    def __post_init__(self) -> None:
        """Check the settings."""
        if not self.width >= 0:
            raise ValueError(f"width: got {self.width!r}, takes a number of at least 0")

    def init(self, arms: int) -> Means:
        """Nothing played."""
        return Means(jnp.zeros(arms), jnp.zeros(arms))

    def choose(self, state: Means) -> tuple[Int[Array, ""], Means]:
        """The arm to play; of equals the first."""
        return jnp.argmax(self.bound(state)).astype(jnp.int32), state

    def bound(self, state: Means) -> Float[Array, "k"]:
        """Each arm's upper confidence bound; infinite if it was not played."""
        n = jnp.maximum(state.count, 1)
        radius = jnp.sqrt(2 * jnp.log(jnp.maximum(state.count.sum(), 1)) / n)
        return jnp.where(state.count > 0, state.total / n + self.width * radius, jnp.inf)

    def observe(self, state: Means, arm: Int[Array, ""], reward: Float[Array, "k"]) -> Means:
        """The state after a round; of the rewards only the played arm's is read."""
        return Means(state.count.at[arm].add(1), state.total.at[arm].add(reward[arm]))


@dataclasses.dataclass(frozen=True)
class Weighted(abc.ABC):
    """Arms drawn with weights exp(-rate L), where L sums each arm's losses; subclasses say the rate and the losses."""

    seed: int = 0

    def init(self, arms: int) -> Weights:
        """Nothing played."""
        key = jax.random.key_data(jax.random.key(self.seed, impl="threefry2x32"))
        return Weights(jnp.zeros(arms), jnp.int32(0), key)

    @abc.abstractmethod
    def rate(self, arms: int, round: Array) -> Array:
        """The rate in the given round, counted from 1."""

    def chance(self, state: Weights) -> Float[Array, "k"]:
        """The law that the arm is drawn from."""
        return jax.nn.softmax(-self.rate(state.loss.shape[0], state.rounds + 1) * state.loss)

    def choose(self, state: Weights) -> tuple[Int[Array, ""], Weights]:
        """The arm to play."""
        key, own = jax.random.split(jax.random.wrap_key_data(state.key, impl="threefry2x32"))
        arm = jax.random.categorical(own, jnp.log(self.chance(state))).astype(jnp.int32)
        return arm, dataclasses.replace(state, key=jax.random.key_data(key))


@dataclasses.dataclass(frozen=True)
class Exp3(Weighted):
    """EXP3Spec (BanditSpec, arXiv 2505.15141): arms drawn with exponential weights, for rewards that follow no law.

    A loss, 1 - reward, counts over the chance that its arm had, and the t-th round's rate is sqrt(log k / (k t)): EXP3
    for any number of rounds, as it is generally written; after the paper's abstract.

    Attributes:
        seed: of the draws, which are independent of the text's noise.
    """

    full = False

    def rate(self, arms: int, round: Array) -> Array:
        """See above."""
        return jnp.sqrt(math.log(arms) / (arms * round))

    def observe(self, state: Weights, arm: Int[Array, ""], reward: Float[Array, "k"]) -> Weights:
        """The state after a round; of the rewards only the played arm's is read."""
        loss = state.loss.at[arm].add((1 - reward[arm]) / self.chance(state)[arm])
        return dataclasses.replace(state, loss=loss, rounds=state.rounds + 1)


@dataclasses.dataclass(frozen=True)
class Hedge(Weighted):
    """Full information (Not-a-Bandit, arXiv 2510.20064): exponential weights over every arm's own losses.

    What it competes with is the best single drafter in hindsight, at a price of log k in the number of drafters, where
    a bandit pays with k. The learner is Hedge at the rate sqrt(8 log k / t); after the paper's abstract.

    Attributes:
        seed: of the draws, which are independent of the text's noise.
    """

    full = True

    def rate(self, arms: int, round: Array) -> Array:
        """See above."""
        return jnp.sqrt(8 * math.log(arms) / round)

    def observe(self, state: Weights, arm: Int[Array, ""], reward: Float[Array, "k"]) -> Weights:
        """The state after a round, whichever arm was played."""
        return dataclasses.replace(state, loss=state.loss + 1 - reward, rounds=state.rounds + 1)
