"""Training an autoregressive drafter on several steps of its own: what each step sees, and which rows are kept."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def sees(
    query_step: Int[Array, "..."], query: Int[Array, "..."], key_step: Int[Array, "..."], key: Int[Array, "..."]
) -> Bool[Array, "..."]:
    """EAGLE-3's training-time test (arXiv 2503.01840): what row `query` of step `query_step` sees; all broadcast.

    Step 0 rows hold the target's features, and are seen causally up to the query's own row; of the steps 1 .. its own
    only its own row is seen: the chain that starts there.
    """
    first = (key_step == 0) & (key <= query)
    own = (key_step > 0) & (key_step <= query_step) & (key == query)
    return first | own


def unroll_mask(length: int, steps: int) -> Bool[Array, "q q"]:
    """`sees` for all rows: row s * length + t is row t of step s."""
    step, row = (x.reshape(-1) for x in jnp.meshgrid(jnp.arange(steps), jnp.arange(length), indexing="ij"))
    return sees(step[:, None], row[:, None], step[None], row[None])


def kept_rows(length: int, depths: int, rate: float, floor: float = 0.0) -> tuple[int, ...]:
    """How many of `length` chains are trained at each depth d: length * max(rate^d, floor), rounded down, at least 1.

    PARD and P-EAGLE (arXiv 2504.18583, 2602.01469): rate 0.7 to 0.8, floor 0.2.

    Raises ValueError for a rate or floor outside their range.
    """
    if not 0 < rate <= 1 or not 0 <= floor <= 1:
        raise ValueError(f"rate, floor: got {rate} and {floor}, takes numbers in (0, 1] and [0, 1]")
    return tuple(max(1, int(length * max(rate**d, floor))) for d in range(depths))


def conditional_drop(key: Array, real: Bool[Array, "r"]) -> Int[Array, "r"]:
    """Conditional drop-token (COD) sampling: a text's anchors in a random order, the real ones first.

    The chains that are trained at depth d are those of the first so many anchors (`kept_rows`). So those of a depth are
    among those of the depth above, and every kept row has all rows that it sees.
    """
    luck = jax.random.uniform(key, real.shape)
    return jnp.argsort(jnp.where(real, luck, 2.0)).astype(jnp.int32)
