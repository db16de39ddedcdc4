"""Requests from plain values, checked: what reaches the compiled program fits it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from spec_jax import noise
from spec_jax.engine.engine import Engine
from spec_jax.engine.rows import Requests
from spec_jax.sampling.constraint import FREE
from spec_jax.sampling.settings import Sampling, to_row


def request(
    engine: Engine,
    prompt: Sequence[int],
    max_new_tokens: int | None = None,
    key: Array | int = 0,
    sampling: Sampling | None = None,
    eos: Sequence[int] = (),
    stops: Sequence[Sequence[int]] = (),
    constraint_start: int = FREE,
    generated: Sequence[int] = (),
) -> Requests:
    """One request as a batch of one row.

    Args:
        engine: its sizes are what the request is checked against.
        prompt: token ids, at least one, at most max_len.
        max_new_tokens: budget; None means up to max_len. A budget that does not fit behind the prompt is refused.
        key: the request's key or seed; it, not the slot, decides the text.
        sampling: settings; None is greedy.
        eos: end-of-sequence ids, any of which ends the text.
        stops: stop sequences of token ids, any of which ends the text when it has been generated as a whole.
        constraint_start: the constraint's first state for this request (`constraint.bank` returns it). A number that
            its table lacks allows no token, so the request finishes as INVALID.
        generated: tokens that an earlier run of this request already emitted and that did not end it; they count
            against the budget.

    Raises:
        ValueError: for anything that does not fit, naming the argument.
    """
    vocab, sampling = engine.target.vocab_size, sampling or Sampling()
    text = [*check_ids("prompt", prompt, vocab), *check_ids("generated", generated, vocab)]
    if len(prompt) == 0:
        raise ValueError("prompt: got no tokens, takes at least one (a beginning-of-sequence token will do)")
    for i, stop in enumerate(stops):
        check_ids(f"stops[{i}]", stop, vocab)
    if len(prompt) > engine.max_len:
        raise ValueError(f"prompt: got {len(prompt)} tokens, takes at most max_len {engine.max_len}")
    if max_new_tokens is None:
        max_new_tokens = engine.max_len - len(prompt)
    if not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens: got {max_new_tokens!r}, takes an integer of at least 0")
    if len(prompt) + max_new_tokens > engine.max_len:
        raise ValueError(
            f"max_new_tokens: got {max_new_tokens} behind a prompt of {len(prompt)} tokens, takes at most "
            f"{engine.max_len - len(prompt)} (max_len {engine.max_len})"
        )
    if len(generated) > max_new_tokens:
        raise ValueError(f"generated: got {len(generated)} tokens, takes at most max_new_tokens {max_new_tokens}")
    if sampling.min_new_tokens > max_new_tokens:
        raise ValueError(
            f"min_new_tokens: got {sampling.min_new_tokens}, takes at most max_new_tokens {max_new_tokens}"
        )
    if len(stops) > engine.max_stops:
        raise ValueError(f"stops: got {len(stops)} sequences, takes at most {engine.max_stops} (Engine.max_stops)")
    table = np.full((engine.max_stops, engine.max_stop_length), -1)
    for i, stop in enumerate(stops):
        if not 1 <= len(stop) <= engine.max_stop_length:
            raise ValueError(f"stops[{i}]: got {len(stop)} tokens, takes 1 .. {engine.max_stop_length}")
        table[i, -len(stop) :] = stop
    ended = _first_end(generated, eos, stops, sampling.min_new_tokens)
    if ended is not None:
        raise ValueError(
            f"generated: got a text that an end-of-sequence token or a stop ends at token {ended}, takes an open one"
        )
    if not isinstance(constraint_start, int) or constraint_start < 0:
        raise ValueError(
            f"constraint_start: got {constraint_start!r}, takes a state of the engine's constraint, from 0"
        )
    words = noise.request_key(key)
    if words.shape != (2,):
        raise ValueError(f"key: got keys of shape {list(words.shape)}, takes one key")
    buffer = np.zeros(engine.max_len)
    buffer[: len(text)] = text
    whole = lambda x: np.asarray(x, np.int32)[None]  # noqa: E731
    row = to_row(sampling, vocab, tuple(int(e) for e in eos), engine.max_bias, engine.max_eos, batch=1)
    numbers = (buffer, len(text), len(prompt), len(prompt) + max_new_tokens, table, constraint_start)
    tokens, length, prompt_length, limit, ends, state = jax.device_put([whole(x) for x in numbers])
    return Requests(tokens, length, prompt_length, limit, words[None], row, ends, state)


def check_ids(name: str, ids: Any, vocab: int) -> list[int]:
    """Token ids as a list; ValueError for what is no sequence of integers, or has one that is no id."""
    found = np.asarray(ids) if isinstance(ids, np.ndarray | jax.Array) else ids
    if isinstance(found, np.ndarray):
        found = list(found) if found.ndim == 1 else None
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        raise ValueError(f"{name}: got {ids!r}, takes a sequence of token ids")
    odd = [t for t in found if not _is_whole(t)]
    if odd:
        raise ValueError(f"{name}: got {odd[:8]}, takes token ids, which are integers")
    outside = sorted({int(t) for t in found if not 0 <= t < vocab})
    if outside:
        raise ValueError(f"{name}: got token ids {outside[:8]}, takes ids 0 .. {vocab - 1}")
    return [int(t) for t in found]


def _is_whole(value: Any) -> bool:
    """Whether a value is an integer: Python's, NumPy's or an array of one."""
    if isinstance(value, jax.Array):
        return value.ndim == 0 and jnp.issubdtype(value.dtype, jnp.integer)
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _first_end(tokens: Sequence[int], eos: Sequence[int], stops: Sequence[Sequence[int]], min_new: int) -> int | None:
    for end in range(1, len(tokens) + 1):
        stopped = any(list(tokens[max(0, end - len(s)) : end]) == list(s) for s in stops)
        if tokens[end - 1] in eos or stopped and end >= min_new:
            return end - 1
    return None


def stack(requests: Sequence[Requests]) -> Requests:
    """Several requests as one batch."""
    return _joined(tuple(requests))


@jax.jit
def _joined(requests: tuple[Requests, ...]) -> Requests:
    return jax.tree.map(lambda *x: jnp.concatenate(x), *requests)
