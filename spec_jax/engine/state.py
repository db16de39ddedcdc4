"""The engine's state: one frozen dataclass of arrays, a row per request."""

from __future__ import annotations

import enum
from typing import Any

import flax.struct
from jaxtyping import Array, Bool, Float, Int

from spec_jax.noise import Keys
from spec_jax.sampling.settings import SamplingRow


class Finish(enum.IntEnum):
    """Why a row stopped, or that it has not."""

    RUNNING = 0
    EMPTY = 1
    EOS = 2
    STOP = 3
    BUDGET = 4
    MAX_LEN = 5
    INVALID = 6
    CLOSED = 7


@flax.struct.dataclass
class Counters:
    """Counts per row since its request began.

    rounds: target passes; scored: nodes that the passes were wide, unused ones and roots too; drafted: nodes verified,
    roots left out; accepted: drafted nodes that were emitted; emitted: tokens. emitted = accepted + rounds - trimmed,
    where trimmed counts rounds whose correction or bonus token fell to a budget, end of sequence or stop.
    depth_reached[d] counts the rounds whose draft had a node at depth d + 1, and depth_accepted[d] those in which it
    was emitted.
    """

    rounds: Int[Array, "b"]
    scored: Int[Array, "b"]
    drafted: Int[Array, "b"]
    accepted: Int[Array, "b"]
    emitted: Int[Array, "b"]
    trimmed: Int[Array, "b"]
    depth_reached: Int[Array, "b d"]
    depth_accepted: Int[Array, "b d"]


@flax.struct.dataclass
class Rows:
    """The requests. A row's text is tokens[:length]: the prompt, then what was emitted; the last token is the anchor.

    limit is the longest text of the row (prompt plus budget, at most the engine's max_len). stops hold stop sequences,
    right-aligned, -1 before them. state is the constraint's state.
    Log-probs stand at their token's index, NaN for tokens emitted by an earlier run.
    """

    tokens: Int[Array, "b text"]
    length: Int[Array, "b"]
    prompt_length: Int[Array, "b"]
    limit: Int[Array, "b"]
    finish: Int[Array, "b"]
    key: Keys
    sampling: SamplingRow
    stops: Int[Array, "b k q"]
    state: Int[Array, "b"]
    counters: Counters
    raw_log_probs: Float[Array, "b text"] | None
    log_probs: Float[Array, "b text"] | None

    @property
    def running(self) -> Bool[Array, "b"]:
        """Rows that still emit."""
        return self.finish == Finish.RUNNING


@flax.struct.dataclass
class EngineState:
    """Everything that a round reads and writes. The target's state holds each row's text without its anchor."""

    rows: Rows
    target: Any
    drafter: Any
    controller: Any
