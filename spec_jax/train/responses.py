"""Responses that the target writes itself: a drafter learns the target's own text, not somebody else's.

They come from the engine, so any drafter that is there already makes them come faster, and none changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from spec_jax import noise
from spec_jax.engine.decoder import Decoder, Result
from spec_jax.sampling.settings import Sampling
from spec_jax.train.store import Store, Text


def regenerate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    store: Store,
    *,
    key: int = 0,
    sampling: Sampling | None = None,
    shard: int = 256,
    chunk_rounds: int = 16,
    report: Callable[[int], None] | None = None,
) -> None:
    """Write the target's response to every prompt that the store has none for yet.

    Text i is prompt i and its response, which depends on the key and i alone; the loss counts the response. Stopped and
    called again, it goes on; at most `shard` texts and those in the slots are lost.

    Args:
        decoder: an idle decoder.
        prompts: token ids.
        max_new_tokens: longest response.
        store: see `Store`; its `about` should say which target and settings.
        key: the seed of all responses.
        sampling: settings; DSpark's data (arXiv 2607.05147) has temperature 0.7, top-p 0.8 and top-k 20.
        shard: texts per shard.
        chunk_rounds: rounds between two looks at what is finished.
        report: called with the number of tokens of each response.
    """
    if decoder.busy:
        raise ValueError("decoder: got one with requests, takes an idle one")
    first, there = noise.request_key(key), store.numbers()
    todo = iter([i for i in range(len(prompts)) if i not in there])
    running: dict[int, int] = {}
    finished: list[Text] = []
    while True:
        while len(running) < 2 * decoder.batch and (number := next(todo, None)) is not None:
            own = noise.sample_key(first, number)
            [id] = decoder.submit(prompts[number], max_new_tokens, key=own, sampling=sampling)
            running[id] = number
        if not running:
            break
        for update in decoder.step(chunk_rounds):
            if update.result is None:
                continue
            finished.append(as_text(update.result, running.pop(update.id)))
            if report is not None:
                report(len(update.result.tokens))
        if len(finished) >= shard:
            store.append(finished)
            finished = []
    store.append(finished)


def as_text(result: Result, number: int) -> Text:
    """A finished request as a text whose emitted tokens the loss counts."""
    tokens = np.array([*result.prompt, *result.tokens], np.int32)
    return Text(number, tokens, np.arange(len(tokens)) >= len(result.prompt))
