"""Prompts to train on: passages of texts, prompts that the target makes up itself, none of the evaluation sets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from spec_jax import noise
from spec_jax.engine.decoder import Decoder
from spec_jax.sampling.settings import Sampling


def beginnings(
    texts: Iterable[Sequence[int]], count: int, shortest: int, longest: int, seed: int = 0
) -> list[tuple[int, ...]]:
    """`count` passages of `shortest` to `longest` tokens, from random places of texts, for a target to go on from.

    A text is drawn in proportion to its length; some passages begin at a text's start. Raises ValueError for bounds
    that no text fits.
    """
    if not 1 <= shortest <= longest:
        raise ValueError(f"shortest, longest: got {shortest} and {longest}, takes 1 <= shortest <= longest")
    fitting = [text for text in texts if len(text) >= shortest]
    if not fitting:
        raise ValueError(f"texts: got none of {shortest} tokens or more, takes at least one")
    rng = np.random.default_rng(seed)
    share = np.array([len(text) for text in fitting], float)
    found = []
    for at in rng.choice(len(fitting), size=count, p=share / share.sum()):
        text = fitting[at]
        length = int(rng.integers(shortest, min(longest, len(text)) + 1))
        start = int(rng.integers(0, len(text) - length + 1)) if rng.random() < 0.75 else 0
        found.append(tuple(int(token) for token in text[start : start + length]))
    return found


def made_up(
    decoder: Decoder,
    before: Sequence[int],
    stop: Sequence[int],
    after: Sequence[int],
    count: int,
    longest: int,
    key: int = 0,
    sampling: Sampling | None = None,
) -> list[tuple[int, ...]]:
    """Prompts that a chat model writes when it is given the beginning of the user's turn and nothing else (Magpie).

    Args:
        decoder: an idle decoder.
        before: tokens of the chat format up to where the user's words begin.
        stop: tokens that end the user's turn.
        after: tokens from there to where the answer begins.
        count: how many to ask for; those that do not end within `longest` tokens, empty ones and repeats are left out.
        longest: most tokens of the user's words.
        key: the seed of all prompts.
        sampling: settings; temperature 1 if None.
    """
    settings = Sampling(temperature=1.0) if sampling is None else sampling
    options = {"stops": [list(stop)], "eos": (), "sampling": settings}
    first = noise.request_key(key)
    ids = [decoder.submit(before, longest, key=noise.sample_key(first, i), **options)[0] for i in range(count)]
    done = {update.id: update.result for update in decoder.run() if update.result is not None}
    found: dict[tuple[int, ...], None] = {}
    for id in ids:
        words = done[id].tokens[: -len(stop)]
        if done[id].finish == "stop" and words:
            found[(*before, *words, *stop, *after)] = None
    return list(found)


def without_overlap(
    prompts: Iterable[Sequence[int]], held_out: Iterable[Sequence[int]], n: int = 13
) -> list[tuple[int, ...]]:
    """The prompts that share no run of n tokens with a held-out text (shorter held-out texts count as a whole)."""
    if n < 1:
        raise ValueError(f"n: got {n}, takes 1 or more")
    banned: dict[int, set[tuple[int, ...]]] = {}
    for text in held_out:
        size = min(n, len(text))
        if size:
            banned.setdefault(size, set()).update(_runs(text, size))
    clean = lambda prompt: all(runs.isdisjoint(_runs(prompt, size)) for size, runs in banned.items())  # noqa: E731
    return [tuple(int(token) for token in prompt) for prompt in prompts if clean(prompt)]


def _runs(text: Sequence[int], size: int) -> Iterable[tuple[int, ...]]:
    return (tuple(int(token) for token in text[i : i + size]) for i in range(len(text) - size + 1))
