"""When a rollout speculates: by what a round costs at the batch's size, and what it brings."""

from __future__ import annotations

import dataclasses
import functools
import math

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax.checks import check_number, check_sizes
from spec_jax.control.cost import CostModel

_STEADY, _MOST, _HELD_UP = 2, 16.0, 8.0
"""Rounds in a row that weigh as much as what was known; most plain rounds' time that is put aside; and the most that
rounds are taken to last, in times of what they should: what held them up longer was something else."""


@dataclasses.dataclass(frozen=True)
class RoundCost:
    """Seconds (or any unit) of a round at one batch size: without a draft, and with one, by its width."""

    plain: float
    speculative: CostModel

    def __post_init__(self) -> None:
        """Check both."""
        check_number("plain", self.plain, 0, open_low=True)
        if not isinstance(self.speculative, CostModel):
            raise ValueError(f"speculative: got {self.speculative!r}, takes a CostModel")

    def ratio(self, width: float) -> float:
        """Plain rounds that a speculative one of a mean width takes, rounded; the table says how it extends."""
        return self.speculative.of(max(1, round(width))) / self.plain

    @property
    def risk(self) -> float:
        """Plain rounds that a speculative one of any width can take beyond the one that its first token is worth."""
        return max(0.0, max(self.speculative.seconds) / self.plain - 1)

    @property
    def most(self) -> float:
        """Tokens that a speculative round can bring in a plain one's time, if all nodes it verifies are accepted."""
        table = self.speculative
        return max(n * self.plain / seconds for n, seconds in zip(table.nodes, table.seconds, strict=True))

    def seen(self, rounds: int, seconds: float) -> RoundCost:
        """The costs after so many plain rounds in a row took so long; the more they are, the more they weigh.

        A mean grows by 5 % at most: a pause of the machine would else make drafts look cheap.
        """
        moved = (seconds / rounds / self.plain) ** _weight(rounds)
        return dataclasses.replace(self, plain=self.plain * min(moved, 1.05))

    def spent(self, rounds: int, seconds: float, width: float) -> float:
        """Plain rounds that each of so many speculative ones took by the clock."""
        return min(seconds / rounds / self.plain, _HELD_UP * self.ratio(width))

    def drafted(self, rounds: int, seconds: float, width: float) -> RoundCost:
        """The costs after so many speculative rounds in a row, of a mean width, took so long; all widths' alike."""
        moved = (self.spent(rounds, seconds, width) / self.ratio(width)) ** _weight(rounds)
        table = self.speculative
        return dataclasses.replace(self, speculative=CostModel(table.nodes, tuple(s * moved for s in table.seconds)))


def _weight(rounds: int) -> float:
    return rounds / (rounds + _STEADY)


@flax.struct.dataclass
class ToggleState:
    """By batch size: what speculating brought, when it is tried again, and how long it goes on.

    gain: tokens per plain round's time (0: not tried). saved: plain rounds' time that trials may cost. wait: plain
    rounds before the next trial at least. look: rounds before the next decision while it pays. failed: segments in a
    row that did not pay.
    """

    gain: Float[Array, "s"]
    saved: Float[Array, "s"]
    wait: Int[Array, "s"]
    look: Int[Array, "s"]
    failed: Int[Array, "s"]


@dataclasses.dataclass(frozen=True)
class Toggle:
    """Speculates where it has paid: EfficientRollout's on/off policy in our reading.

    At each compiled batch size the gain is (tokens per row and round) x (plain round) / (speculative round). Plain
    rounds put aside `loss` of their time for trials. A trial is made of what is put aside: as many rounds, `probe` at
    most, as that pays for even if no draft is accepted. While the gain is over `margin`, speculation goes on, and is
    looked at after `probe` rounds, twice as many, and so on up to `every`. Else plain rounds follow, `every` of them or
    as many as make up for what was lost, and twice as many after every further trial in a row that did not pay, up to
    `patience` times. So a rollout takes longer than plain decoding by no more than `loss`, and less the longer nothing
    pays, but for what a drafter loses after it has paid, until the next look.

    Nothing is tried at a size whose rounds with drafts would not pay even if all drafts were accepted whole.

    Attributes:
        margin: least gain that speculation must bring: more than one, for what rounds don't show.
        probe: most rounds of a trial.
        every: rounds behind a trial that did not pay at least; while speculation is on, between decisions at most.
        decay: weight of the older gain in the running mean.
        loss: part of the plain rounds' time that trials may cost.
        patience: how many times as long plain rounds can follow a trial as after the first one that did not pay.
    """

    margin: float = 1.05
    probe: int = 4
    every: int = 64
    decay: float = 0.5
    loss: float = 0.02
    patience: int = 16

    def __post_init__(self) -> None:
        """Check the settings."""
        check_number("margin", self.margin, 0, open_low=True)
        check_sizes(self, probe=1, every=1, patience=1)
        check_number("decay", self.decay, 0, 1)
        if self.decay == 1:
            raise ValueError(f"decay: got {self.decay!r}, takes less than 1, so that a gain can change")
        check_number("loss", self.loss, 0, 1, open_low=True)

    def init(self, sizes: int) -> ToggleState:
        """Nothing tried at any of `sizes` batch sizes, nothing put aside."""
        ints = lambda value: jnp.full(sizes, value, jnp.int32)  # noqa: E731
        return ToggleState(jnp.zeros(sizes), jnp.zeros(sizes), ints(0), ints(self.probe), ints(0))

    @functools.partial(jax.jit, static_argnums=0)
    def pays(self, state: ToggleState, size: Int[Array, ""] | int) -> Bool[Array, ""]:
        """Whether speculating has paid at the size of that index."""
        return state.gain[size] > self.margin

    @functools.partial(jax.jit, static_argnums=0)
    def decide(
        self,
        state: ToggleState,
        size: Int[Array, ""] | int,
        risk: Float[Array, ""] | float,
        most: Float[Array, ""] | float = math.inf,
    ) -> tuple[Bool[Array, ""], Int[Array, ""]]:
        """Whether to speculate at the size of that index, and for how many rounds before the next decision.

        risk: plain rounds that a speculative one can cost at most, less one (`RoundCost.risk`).
        most: tokens that it can bring in a plain one's time (`RoundCost.most`); nothing is tried that can't pay.
        """
        saved, wait, good = state.saved[size], state.wait[size], self.pays(state, size)
        need = jnp.minimum(risk, _MOST)
        hopeless = jnp.less_equal(most, self.margin)
        ready = (wait <= 0) & (saved >= need - 1e-4) & ~hopeless
        trial = jnp.clip(jnp.floor((jnp.minimum(saved, self.probe) + 1e-4) / jnp.maximum(risk, 1e-6)), 1, self.probe)
        plain = jnp.where(hopeless, self.every, jnp.maximum(wait, jnp.ceil((need - saved) / self.loss - 1e-2)))
        plain = jnp.clip(plain, 1, self.every)
        rounds = jnp.where(good, state.look[size], jnp.where(ready, trial, plain))
        return good | ready, rounds.astype(jnp.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def observe(
        self,
        state: ToggleState,
        size: Int[Array, ""] | int,
        on: Bool[Array, ""] | bool,
        rounds: Int[Array, ""] | int,
        tokens: Float[Array, ""] | float = 1.0,
        ratio: Float[Array, ""] | float = 1.0,
        spent: Float[Array, ""] | float | None = None,
    ) -> ToggleState:
        """The state after a segment of `rounds` rounds; of a speculating one, tokens per row and round, and its ratio.

        ratio: plain rounds that one of its rounds takes; it says whether speculation pays.
        spent: plain rounds' time that the segment took by round, with what it cost to begin it (a drafter that is told
            what it missed); it says what a trial cost. None: ratio.
        """
        spent = ratio if spent is None else spent
        on, rounds = jnp.asarray(on) & (jnp.asarray(rounds) > 0), jnp.asarray(rounds, jnp.float32)
        old, gain = state.gain[size], tokens / ratio
        mean = jnp.where(on, jnp.where(old == 0, gain, self.decay * old + (1 - self.decay) * gain), old)
        good = mean > self.margin
        saved = jnp.minimum(state.saved[size] + rounds * jnp.where(on, tokens - spent, self.loss), _MOST)
        repaid = jnp.maximum(jnp.ceil(rounds * (spent - tokens) / self.loss), self.every)
        repaid *= jnp.minimum(2.0 ** jnp.minimum(state.failed[size], 30), self.patience)
        failed = jnp.where(on, jnp.where(good, 0, state.failed[size] + 1), state.failed[size])
        wait = jnp.where(on, jnp.where(good, 0, repaid), jnp.maximum(state.wait[size] - rounds, 0))
        look = jnp.where(on & good, jnp.minimum(2 * state.look[size], self.every), self.probe)
        put = lambda x, value: x.at[size].set(value.astype(x.dtype))  # noqa: E731
        return ToggleState(
            put(state.gain, mean),
            put(state.saved, saved),
            put(state.wait, wait),
            put(state.look, look),
            put(state.failed, failed),
        )
