"""The loop around the round: one compiled program per chunk, the host touched at its edges only."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.round import decode_round
from spec_jax.engine.state import EngineState


def decode(
    engine: Engine,
    params: EngineParams,
    state: EngineState,
    max_rounds: Int[Array, ""] | int | None = None,
    until_any_finishes: bool = False,
) -> EngineState:
    """Rounds until no row runs, or until `max_rounds` rounds have gone by (None: no such bound).

    until_any_finishes also ends the loop as soon as one more row has finished, so that its slot can be filled.
    """
    bound = jnp.asarray(2**31 - 1 if max_rounds is None else max_rounds, jnp.int32)
    at_start = state.rows.running.sum()

    def more(carry: tuple[Array, EngineState]) -> Array:
        rounds, s = carry
        running = s.rows.running.sum()
        enough = running < at_start if until_any_finishes else jnp.bool_(False)
        return (running > 0) & (rounds < bound) & ~enough

    body = lambda carry: (carry[0] + 1, decode_round(engine, params, carry[1]))  # noqa: E731
    return lax.while_loop(more, body, (jnp.int32(0), state))[1]
