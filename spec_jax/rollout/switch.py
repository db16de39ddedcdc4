"""Whether the next rounds of a rollout draft: always, or as a toggle says, by what rounds take and bring."""

from __future__ import annotations

from typing import Protocol

import jax
import numpy as np
from jaxtyping import Bool, Int

from spec_jax.engine import devices
from spec_jax.engine.engine import Engine
from spec_jax.rollout.records import Carried, Segment
from spec_jax.rollout.toggle import Toggle, ToggleState

_MANY = 2**31 - 1


def pace(tokens: Int[np.ndarray, "r"], ended: Bool[np.ndarray, "r"], rounds: int, waiting: bool) -> float:
    """Tokens by round that say how soon a call ends, of the tokens that each row got in so many rounds.

    While others wait for slots it is every row's mean, those that ended on the way included. Behind that it is the mean
    of the rows that still run: drafts end rows at different times, plain rounds rather together, and how soon the
    others were through is no help to those that are left. If none is, it is the longest's, which plain rounds would
    have taken one by one.
    """
    if not rounds:
        return 0.0
    if waiting:
        return float(tokens.mean()) / rounds
    return float(tokens.max() if ended.all() else tokens[~ended].mean()) / rounds


class Switch(Protocol):
    """What a run asks before its rounds, and tells behind them. `size` is a batch's, `index` its place among all.

    plain says whether rounds without drafts may come.
    """

    plain: bool

    def pays(self, index: int) -> bool:
        """Whether drafting is expected to go on at a size."""
        ...

    def decide(self, size: int, index: int) -> tuple[bool, int]:
        """Whether the next rounds draft, and how many they are at most."""
        ...

    def observe(self, index: int, segment: Segment, width: float, seconds: float | None) -> None:
        """What a segment brought, whose rounds verified `width` nodes in the mean.

        seconds: what it took with all around it; None where something was compiled.
        """
        ...


class Always:
    """Every round drafts."""

    plain = False

    def pays(self, index: int) -> bool:
        """Always."""
        return True

    def decide(self, size: int, index: int) -> tuple[bool, int]:
        """Drafts, without end."""
        return True, _MANY

    def observe(self, index: int, segment: Segment, width: float, seconds: float | None) -> None:
        """Nothing is learned."""


class Toggled:
    """Rounds draft as the toggle says; what it learns and what rounds take is carried on."""

    plain = True

    def __init__(self, engine: Engine, toggle: Toggle, carried: Carried) -> None:
        """Set up."""
        self.engine, self.toggle, self.carried = engine, toggle, carried

    @property
    def _state(self) -> ToggleState:
        assert self.carried.toggle is not None
        return self.carried.toggle

    def pays(self, index: int) -> bool:
        """Whether it has paid."""
        return bool(self.toggle.pays(self._state, index))

    def decide(self, size: int, index: int) -> tuple[bool, int]:
        """What the toggle decides."""
        cost = self.carried.costs[size]
        on, rounds = jax.device_get(self.toggle.decide(self._state, index, cost.risk, cost.most))
        return bool(on), int(rounds)

    def observe(self, index: int, segment: Segment, width: float, seconds: float | None) -> None:
        """The toggle is told."""
        told = (segment.drafting, segment.rounds, segment.pace, *self._took(segment, width, seconds))
        self.carried.toggle = self.toggle.observe(self._state, index, *told)

    def _took(self, segment: Segment, width: float, seconds: float | None) -> tuple[float, float]:
        """Plain rounds that a segment's rounds take each, and took with what it cost to begin and to end the segment.

        Where nobody has said what rounds take, the clock has a say in both; not in a segment that compiled something,
        whose `seconds` are None.
        """
        size, rounds = segment.size, segment.rounds
        cost, spent = self.carried.costs[size], 0.0
        if seconds is not None and rounds > 0 and size in self.carried.measured:
            seconds = float(devices.of_first(self.engine, np.array(seconds)))
            cost = cost.drafted(rounds, seconds, width) if segment.drafting else cost.seen(rounds, seconds)
            self.carried.costs[size], spent = cost, cost.spent(rounds, seconds, width)
        ratio = cost.ratio(width)
        return (ratio, max(ratio, spent)) if segment.drafting else (1.0, 1.0)
