"""The loop around the round: one compiled program per chunk, the host touched at its edges only."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from spec_jax.engine import devices
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.round import decode_round
from spec_jax.engine.state import EngineState


def decode(
    engine: Engine,
    params: EngineParams,
    state: EngineState,
    max_rounds: Int[Array, ""] | int | None = None,
    until_any_finishes: bool = False,
    until_running: Int[Array, ""] | int = 0,
) -> EngineState:
    """Rounds until no row runs, or until `max_rounds` rounds have gone by (None: no such bound).

    until_any_finishes also ends the loop as soon as one more row has finished, so that its slot can be filled;
    until_running, as soon as no more than so many rows run, so that they can move to a smaller batch.
    """
    bound = jnp.asarray(2**31 - 1 if max_rounds is None else max_rounds, jnp.int32)
    enough = jnp.asarray(until_running, jnp.int32)
    if until_any_finishes:
        enough = jnp.maximum(enough, state.rows.running.sum() - 1)

    def more(carry: tuple[Array, EngineState]) -> Array:
        rounds, s = carry
        return (s.rows.running.sum() > enough) & (rounds < bound)

    body = lambda carry: (carry[0] + 1, decode_round(engine, params, carry[1]))  # noqa: E731
    return devices.settled(engine, lax.while_loop(more, body, (jnp.int32(0), state))[1])
