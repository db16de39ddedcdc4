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
    """How many rows of a text of `length` tokens are trained at each depth: length * max(rate^d, floor), rounded down.

    PARD and P-EAGLE (arXiv 2504.18583, 2602.01469): rate 0.7 to 0.8, floor 0.2.

    Raises ValueError for a rate or floor outside their range.
    """
    if not 0 < rate <= 1 or not 0 <= floor <= 1:
        raise ValueError(f"rate, floor: got {rate} and {floor}, takes numbers in (0, 1] and [0, 1]")
    return tuple(max(1, int(length * max(rate**d, floor))) for d in range(depths))


def conditional_drop(
    key: Array, mask: Bool[Array, "t"], counts: tuple[int, ...]
) -> tuple[tuple[Int[Array, "_"], Bool[Array, "_"]], ...]:
    """Conditional drop-token (COD) sampling: the chains that are trained at each depth, and which of them are real.

    A chain has the anchor s, ascending within a depth; its row at depth d stands at position s + d and is for the token
    behind it. The chains of a depth are among those of the depth above, so that every kept row has all rows that it
    sees. One is real at depth d if the loss counts the token at s + d + 1; unused ones are 0, behind the others.

    Args:
        key: a typed key.
        mask: which tokens the loss counts.
        counts: rows per depth, not rising (see `kept_rows`).
    """
    if list(counts) != sorted(counts, reverse=True):
        raise ValueError(f"counts: got {counts}, takes numbers that do not rise with depth")
    t = mask.shape[0]
    behind = lambda d: jnp.arange(t) + d + 1  # noqa: E731
    counted = lambda d: (behind(d) < t) & mask[jnp.minimum(behind(d), t - 1)]  # noqa: E731
    order = jnp.argsort(jnp.where(counted(0), jax.random.uniform(key, (t,)), 2.0))
    place = jnp.zeros(t, jnp.int32).at[order].set(jnp.arange(t, dtype=jnp.int32))
    found = []
    for d, count in enumerate(counts):
        chosen = (place < count) & counted(0) & counted(d)
        start = jnp.sort(jnp.where(chosen, jnp.arange(t), t))[: min(count, t)]
        start = jnp.pad(start, (0, count - start.shape[0]), constant_values=t)
        found.append((jnp.where(start < t, start, 0).astype(jnp.int32), start < t))
    return tuple(found)
