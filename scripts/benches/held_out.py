"""Prompts for a model of code without a chat format: the beginnings of files that the small hybrid has not seen."""

from __future__ import annotations

from hybrid import corpus

from spec_jax.models.tokenizer import Tokenizer

CLASS = "held-out"
_BEGINNING, _LEAST = 128, 512


def beginnings(tokenizer: Tokenizer, count: int) -> list[tuple[str, tuple[int, ...]]]:
    """Names and first 128 tokens of the first `count` held-out files of at least 512 tokens.

    Raises ValueError for more files than there are.
    """
    found = []
    for source in corpus.split(corpus.stdlib_sources())[1]:
        ids = tokenizer.encode(source.text)
        if len(ids) >= _LEAST:
            found.append((source.name, tuple(ids[:_BEGINNING])))
    if not 1 <= count <= len(found):
        raise ValueError(f"--prompts: got {count}, takes 1 .. {len(found)} for the class {CLASS}")
    return found[:count]
