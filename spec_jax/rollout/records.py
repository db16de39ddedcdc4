"""What a rollout gives, what outlives it, and what a new policy leaves of that."""

from __future__ import annotations

import dataclasses

import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from spec_jax.checks import check_number, check_sizes
from spec_jax.rollout.memory import Memory
from spec_jax.rollout.schedule import History
from spec_jax.rollout.toggle import RoundCost, ToggleState


@dataclasses.dataclass(frozen=True)
class Segment:
    """Rounds that ran as one program call: batch size, rows that ran at its start, whether drafted, what it gave.

    pace: tokens by round, as the end of the call depends on them (`switch.pace`).
    """

    size: int
    running: int
    drafting: bool
    rounds: int
    row_rounds: int
    tokens: int
    seconds: float
    pace: float


@dataclasses.dataclass(frozen=True)
class Rollout:
    """What a call gave, a row per sample: sample j of prompt i is row i * group + j.

    mask covers exactly the emitted tokens, an ending end-of-sequence token included; behind them stand pad tokens and
    log-probs of 0. finish is a `Finish`; RUNNING marks rows of a partial rollout that were cut off. rounds are each
    row's target passes.
    """

    tokens: Int[np.ndarray, "n t"]
    mask: Bool[np.ndarray, "n t"]
    log_probs: Float[np.ndarray, "n t"]
    finish: Int[np.ndarray, "n"]
    rounds: Int[np.ndarray, "n"]
    segments: tuple[Segment, ...]

    @property
    def length(self) -> Int[np.ndarray, "n"]:
        """Tokens of each row."""
        return self.mask.sum(1)

    @property
    def acceptance_length(self) -> float:
        """Tokens per row and target pass."""
        return float(self.mask.sum() / max(1, self.rounds.sum()))

    @property
    def seconds(self) -> float:
        """Time in decoding programs, compilation included where a program ran for the first time."""
        return sum(s.seconds for s in self.segments)


@dataclasses.dataclass(frozen=True)
class Sync:
    """What a new policy leaves of what drafting has learned; none of it can change a text.

    Attributes:
        max_age: outputs of prompts that none of the last `max_age` policies has answered are dropped; None keeps all.
        calibration: what is left of the controller's counts of accepted drafts, from 0 (start anew) to 1.
    """

    max_age: int | None = None
    calibration: float = 0.5

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.max_age is not None:
            check_sizes(self, max_age=1)
        check_number("calibration", self.calibration, 0, 1)


@dataclasses.dataclass
class Carried:
    """What a call leaves to the next: earlier outputs, lengths, toggle, costs, what rows share, the policy's number.

    measured: sizes whose costs were measured, and follow the clock; the others' were given.
    """

    memory: Memory | None
    history: History
    toggle: ToggleState | None
    costs: dict[int, RoundCost]
    measured: set[int] = dataclasses.field(default_factory=set)
    kept: list[Array] | None = None
    version: int = 0
