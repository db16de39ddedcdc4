"""Where an emitted block ends: budget, end of sequence, stop sequences across block edges, invalid logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax.engine.state import Finish, Rows
from spec_jax.verify.verdict import Verdict


def trim(rows: Rows, verdict: Verdict, max_len: int) -> tuple[Int[Array, "b"], Int[Array, "b"]]:
    """How many tokens of each row's verdict are kept, and the row's finish afterwards.

    The kept part ends with the first token that ends the text: an end-of-sequence token, the last token of a stop
    sequence, or the last one that the limit allows. A token of -1 (invalid logits) ends it before that token.
    """
    keep, finish = jax.vmap(lambda r, v: _trim_row(r, v, max_len))(rows, verdict)
    return jnp.where(rows.running, keep, 0), jnp.where(rows.running, finish, rows.finish)


def _trim_row(row: Rows, verdict: Verdict, max_len: int) -> tuple[Array, Array]:
    m, q = verdict.tokens.shape[0], row.stops.shape[1]
    index, tokens = jnp.arange(m), verdict.tokens
    offered = verdict.accepted + 1
    room = row.limit - row.length
    generated = row.length - row.prompt_length + index + 1
    eos = (tokens[:, None] == row.sampling.eos).any(-1) & (tokens >= 0)
    stop = _stop_ends(row, tokens, q, generated) & (generated >= row.sampling.min_new)
    ends = [
        (tokens < 0, Finish.INVALID),
        (eos, Finish.EOS),
        (stop, Finish.STOP),
        (index + 1 >= room, Finish.MAX_LEN),
    ]
    ended = jnp.stack([flag for flag, _ in ends]).any(0) & (index < offered)
    at = jnp.where(ended, index, m).min()
    why = jnp.int32(Finish.RUNNING)
    for flag, reason in ends:
        limit = jnp.where(row.limit < max_len, Finish.BUDGET, Finish.MAX_LEN)
        code = limit if reason is Finish.MAX_LEN else jnp.int32(reason)
        hit = flag[jnp.minimum(at, m - 1)] & (at < m) & (why == Finish.RUNNING)
        why = jnp.where(hit, code, why)
    keep = jnp.minimum(jnp.where(at < m, at + 1, offered), offered)
    return keep - (why == Finish.INVALID), why.astype(jnp.int32)


def _stop_ends(row: Rows, tokens: Array, q: int, generated: Array) -> Array:
    """Whether a stop sequence, all of it generated, ends at each token of the block."""
    before = jnp.arange(q - 1) - (q - 1) + row.length
    tail = jnp.where(before >= row.prompt_length, row.tokens[jnp.maximum(before, 0)], -2)
    text = jnp.concatenate([tail, tokens])
    windows = text[jnp.arange(tokens.shape[0])[:, None] + jnp.arange(q)]
    same = (windows[:, None, :] == row.stops) | (row.stops < 0)
    return (same.all(-1) & (row.stops[:, -1] >= 0)).any(-1)
