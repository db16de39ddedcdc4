"""When a rollout speculates: by what a round costs at the batch's size, and what it brings."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax.control.cost import CostModel


@dataclasses.dataclass(frozen=True)
class RoundCost:
    """Seconds (or any unit) of a round at one batch size: without a draft, and with one, by its width."""

    plain: float
    speculative: CostModel

    def __post_init__(self) -> None:
        """Check the plain round."""
        if not 0 < self.plain < float("inf"):
            raise ValueError(f"plain: got {self.plain!r}, takes a positive number")

    def seconds(self, width: float) -> float:
        """A speculative round of a mean width, rounded; between and beyond the model's own as it extends them."""
        table = self.speculative
        return float(table.at((max(1, round(width)),))[0]) * table.seconds[0]


@flax.struct.dataclass
class ToggleState:
    """By batch size: tokens per plain-round time that speculating brought (0: not tried); rounds until a new trial."""

    gain: Float[Array, "s"]
    wait: Int[Array, "s"]


@dataclasses.dataclass(frozen=True)
class Toggle:
    """Speculates where it has paid: EfficientRollout's on/off policy in our reading.

    At each compiled batch size the gain is (tokens per row and round) x (plain round) / (speculative round). A size
    that was not tried speculates for `probe` rounds; where the gain stays under `margin`, plain decoding goes on for
    `every` rounds, then the drafter, whose store has grown, is tried again. A rollout is thus slower than plain
    decoding by no more than probe x (cost ratio - gain) / (probe + every).

    Attributes:
        margin: least gain that speculation must bring.
        probe: rounds of a trial.
        every: rounds between trials; while speculation is on, rounds between decisions.
        decay: weight of the older gain in the running mean.
    """

    margin: float = 1.0
    probe: int = 8
    every: int = 256
    decay: float = 0.5

    def __post_init__(self) -> None:
        """Check the settings."""
        if not self.margin > 0:
            raise ValueError(f"margin: got {self.margin!r}, takes a number above 0")
        for name in ("probe", "every"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, takes an integer of at least 1")
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay: got {self.decay!r}, takes a number in [0, 1)")

    def init(self, sizes: int) -> ToggleState:
        """Nothing tried at any of `sizes` batch sizes."""
        return ToggleState(jnp.zeros(sizes), jnp.zeros(sizes, jnp.int32))

    def decide(self, state: ToggleState, size: int) -> tuple[Bool[Array, ""], Int[Array, ""]]:
        """Whether to speculate at the size of that index, and for how many rounds before the next decision."""
        gain, wait = state.gain[size], state.wait[size]
        good = gain > self.margin
        on = good | (gain == 0) | (wait <= 0)
        return on, jnp.where(good, self.every, jnp.where(on, self.probe, jnp.minimum(wait, self.every)))

    def observe(
        self,
        state: ToggleState,
        size: int,
        on: Bool[Array, ""] | bool,
        rounds: Int[Array, ""] | int,
        gain: Float[Array, ""] | float,
    ) -> ToggleState:
        """The state after a segment of `rounds` rounds; gain is that of a speculating one."""
        on = jnp.asarray(on) & (jnp.asarray(rounds) > 0)
        old = state.gain[size]
        mean = jnp.where(old == 0, gain, self.decay * old + (1 - self.decay) * gain)
        after = jnp.where(on, mean, old)
        waited = jnp.maximum(state.wait[size] - rounds, 0)
        wait = jnp.where(on & (after <= self.margin), self.every, waited)
        return ToggleState(state.gain.at[size].set(after), state.wait.at[size].set(wait.astype(jnp.int32)))


def gain(tokens: float, rounds: float, width: float, cost: RoundCost) -> float:
    """Tokens per plain-round time of rows that emitted `tokens` in `rounds` (summed over rows) of a mean width."""
    return tokens / max(rounds, 1) * cost.plain / cost.seconds(width)


def speculates(
    tokens: Float[Array, "*s"], plain: Float[Array, "*s"], speculative: Float[Array, "*s"], margin: float = 1.0
) -> Bool[Array, "*s"]:
    """Where a speculating round's tokens are worth its time: tokens x plain / speculative > margin."""
    return tokens * plain > margin * speculative
