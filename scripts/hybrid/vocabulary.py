"""A small byte-level BPE vocabulary made from the corpus."""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

EOS = "<|endoftext|>"

# Words with the space before them, one to three digits, signs, the indentation of a line together with its line end.
_PATTERN = r" ?\p{L}+| ?_+\p{L}*|\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s*\n(?: +(?= ))?|\s+(?!\S)|\s+"


def eos_id(tokenizer: tokenizers.Tokenizer) -> int:
    """The id of EOS; ValueError if the vocabulary has none."""
    if (number := tokenizer.token_to_id(EOS)) is None:
        raise ValueError(f"tokenizer: got a vocabulary without {EOS}")
    return number


def build(texts: Iterable[str], size: int) -> tokenizers.Tokenizer:
    """Merge the likeliest pairs of bytes until there are `size` tokens, the end of a text (EOS) as token 0 among them.

    Raises ValueError for a size that does not hold all 256 bytes and EOS.
    """
    if size < 257:
        raise ValueError(f"size: got {size}, takes at least 257: every byte and {EOS}")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
