"""Prompts for a target: what it is trained on, and what it is measured on."""

from __future__ import annotations

import random
from collections.abc import Callable

from hybrid import corpus

from benches import prompts as held_out
from drafting import topics
from spec_jax.engine.decoder import Decoder
from spec_jax.models.load import LoadedTarget
from spec_jax.models.tokenizer import Tokenizer
from spec_jax.sampling.settings import Sampling
from spec_jax.train import prompts
from spec_jax.train.recipe import Data, Held

Prompt = tuple[int, ...]

_ASKS = (
    "Explain what the following Python code does.\n\n```python\n{}\n```",
    "Write a docstring for the following Python code.\n\n```python\n{}\n```",
    "Continue the following Python code.\n\n```python\n{}\n```",
    "Add type hints to the following Python code and return it.\n\n```python\n{}\n```",
    "Write unit tests for the following Python code.\n\n```python\n{}\n```",
    "Suggest how the following Python code could be made simpler.\n\n```python\n{}\n```",
)
_MARK = "THE USERS WORDS"


def check(model: LoadedTarget, data: Data) -> None:
    """ValueError for a target without a tokenizer, or for prompts that only one that chats is asked."""
    chats = _tokenizer(model).chat_template is not None
    for name in ("made_up", "asked"):
        if getattr(data, name) and not chats:
            raise ValueError(f"{name}: got {getattr(data, name)} with a target without a chat template, takes 0")


def training_prompts(model: LoadedTarget, data: Data, decoder: Callable[[], Decoder]) -> list[Prompt]:
    """The prompts of a recipe; those too long, or that share 13 tokens in a row with a benchmark's, are left out.

    decoder gives the one that makes prompts up, if any are wanted.
    """
    tokenizer = _tokenizer(model)
    found: list[Prompt] = []
    check(model, data)
    if data.made_up:
        before, after = (tokenizer.encode(part, special=False) for part in _chat(tokenizer, _MARK).split(_MARK))
        longest = max(1, data.longest_prompt - len(before) - len(after))
        sampling = Sampling(temperature=1.0, top_p=0.95)
        found += prompts.made_up(decoder(), before, after[:1], after[1:], data.made_up, longest, data.seed, sampling)
    if data.asked:
        found += [_request(tokenizer, text) for text in topics.requests(data.asked, data.seed)]
    if data.passages:
        train, _ = corpus.split(corpus.stdlib_sources())
        random.Random(data.seed).shuffle(train)
        sources = [tokenizer.encode(source.text) for source in train[: data.files]]
        room = data.longest_prompt - (0 if tokenizer.chat_template is None else 64)
        passages = prompts.beginnings(sources, data.passages, min(16, room), room, data.seed)
        if tokenizer.chat_template is not None:
            asked = [_ASKS[i % len(_ASKS)].format(tokenizer.decode(p)) for i, p in enumerate(passages)]
            passages = [_request(tokenizer, text) for text in asked]
        found += passages
    random.Random(data.seed).shuffle(found)  # a run that is cut short has some of every kind
    fitting = [prompt for prompt in found if len(prompt) <= data.longest_prompt]
    return prompts.without_overlap(fitting, _benchmarks(tokenizer)) if tokenizer.chat_template is not None else fitting


def held_out_prompts(model: LoadedTarget, held: Held, longest: int) -> list[Prompt]:
    """The benchmark's prompts, or beginnings of held-out source files for a target that does not chat."""
    tokenizer = _tokenizer(model)
    if tokenizer.chat_template is None:
        _, unseen = corpus.split(corpus.stdlib_sources())
        texts = [tokenizer.encode(source.text) for source in unseen]
        return prompts.beginnings(texts, held.count * len(held.classes), min(16, longest), longest)
    found = [prompt for cls in held.classes for prompt in held_out.load(cls, held.count)]
    texts = (tokenizer.apply_chat(prompt.messages) for prompt in found)
    return [tuple(tokenizer.encode(text, special=False)) for text in texts]


def _benchmarks(tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts of our benchmarks, as far into each class as any of them goes."""
    found = []
    for cls, count in (("humaneval", 100), ("mtbench", 60), ("gsm8k", 80), ("code-edit", 16), ("summary", 16)):
        found += [tuple(tokenizer.encode(p.messages[0]["content"], special=False)) for p in held_out.load(cls, count)]
    return found


def _tokenizer(model: LoadedTarget) -> Tokenizer:
    if model.tokenizer is None:
        raise ValueError("--target: got a checkpoint without a tokenizer, takes one that has it")
    return model.tokenizer


def _request(tokenizer: Tokenizer, words: str) -> Prompt:
    return tuple(tokenizer.encode(_chat(tokenizer, words), special=False))


def _chat(tokenizer: Tokenizer, words: str) -> str:
    return tokenizer.apply_chat([{"role": "user", "content": words}])
