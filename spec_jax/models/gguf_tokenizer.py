"""The tokenizer that a GGUF file's metadata describes, rebuilt on the `tokenizers` library."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from spec_jax.models.checkpoint import CheckpointError
from spec_jax.models.tokenizer import Tokenizer, frame, library_errors

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED = range(1, 6)
_MARKS = ("bos", "eos", "eot", "eom")
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>")
_LONGEST_PIECE = 512


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer of `tokenizer.*` metadata; None if there is none.

    Takes byte-level BPE ("gpt2") with pre-tokenizer gpt-2, smollm, llama-bpe or qwen2, and SentencePiece BPE ("llama").
    A text ends with the eos, end-of-turn and end-of-message tokens that the metadata name; with eos alone, also with
    the well-known end-of-turn token that the chat template writes. Raises CheckpointError for anything else.
    """
    kind = metadata.get("tokenizer.ggml.model", "no_vocab")
    if kind == "no_vocab":
        return None
    if kind not in ("gpt2", "llama"):
        raise _refusal("model", kind, "'gpt2' (byte-level BPE) or 'llama' (SentencePiece BPE)")
    tokens = _texts(metadata, "tokens")
    if len(set(tokens)) != len(tokens):
        raise CheckpointError("tokenizer.ggml.tokens has a token twice")
    types = metadata.get("tokenizer.ggml.token_type", np.full(len(tokens), _NORMAL))
    if not isinstance(types, np.ndarray) or len(types) != len(tokens):
        raise _refusal("token_type", types, f"{len(tokens)} numbers, one a token")
    ids = {
        name: i
        for name in (*_MARKS, "unknown", "padding")
        if (i := _token_number(metadata, name, len(tokens))) is not None
    }
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise CheckpointError(f"tokenizer.chat_template is {reprlib.repr(template)}; taken: text")
    vocabulary = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED or i in ids.values()}
    with library_errors("the tokenizer metadata are damaged"):
        if kind == "gpt2":
            backend, add_bos = _byte_level(metadata, vocabulary)
        else:
            normal = {token for token, i in vocabulary.items() if types[i] == _NORMAL}
            backend, add_bos = _sentencepiece(metadata, vocabulary, normal, tokens[ids.setdefault("unknown", 0)])
        marks = {ids[name] for name in _MARKS if name in ids}
        control = [t for t, i in vocabulary.items() if types[i] in (_CONTROL, _UNKNOWN) or i in marks]
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
        backend.add_tokens([AddedToken(t, normalized=False) for t, i in vocabulary.items() if types[i] == _USER])
        special = {name: tokens[ids[key]] for name, key in _SPECIAL.items() if key in ids}
        around = {
            name: _around(metadata, name, default, special) for name, default in (("bos", add_bos), ("eos", False))
        }
        frame(backend, **around)
    ends = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    if "eot" not in ids and template:
        ends += [vocabulary[token] for token in _END_OF_TURN if token in control and token in template]
    return Tokenizer(backend, special, template, tuple(dict.fromkeys(ends)))


def _byte_level(metadata: Mapping[str, Any], vocabulary: dict[str, int]) -> tuple[tokenizers.Tokenizer, bool]:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise _refusal("pre", pre, ", ".join(_PRE_TOKENIZERS))
    if metadata.get("tokenizer.ggml.add_space_prefix", False):
        raise _refusal("add_space_prefix", True, "false, for byte-level BPE")
    merges = [tuple(merge.split(" ")) for merge in _texts(metadata, "merges")]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe"))  # pyright: ignore
    backend.normalizer = normalizers.NFC() if pre == "qwen2" else None
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]
    backend.decoder = decoders.ByteLevel()
    return backend, pre == "llama-bpe"


def _sentencepiece(
    metadata: Mapping[str, Any], vocabulary: dict[str, int], normal: set[str], unknown: str
) -> tuple[tokenizers.Tokenizer, bool]:
    """Pieces are merged in the order of their scores; text after every special token starts with a space."""
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", False):
        raise _refusal("remove_extra_whitespaces", True, "false")
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) <= max(vocabulary.values()):
        raise _refusal("scores", scores, "one number a token")
    if longest := next((piece for piece in normal if len(piece) > _LONGEST_PIECE), None):
        raise _refusal("tokens", f"{longest[:20]}...", f"pieces of at most {_LONGEST_PIECE} characters")
    merges = sorted(
        (-float(scores[vocabulary[piece]]), -cut, piece)
        for piece in normal
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    )
    pairs = [(piece[:-cut], piece[-cut:]) for _, cut, piece in merges]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * bool(prefix))
    return backend, True


def _bytes(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior="isolated"), _bytes(False)])


# How each kind of vocabulary cuts text before bytes are merged, as in its models' own tokenizer.json.
_PRE_TOKENIZERS = {
    "gpt-2": _bytes(True),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _bytes(True)]),
    "llama-bpe": _words(r"\p{N}{1,3}"),
    "qwen2": _words(r"\p{N}"),
}


def _texts(metadata: Mapping[str, Any], name: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list):
        raise _refusal(name, value, "a list of texts")
    return value


def _token_number(metadata: Mapping[str, Any], name: str, size: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is not None and not (isinstance(value, int) and 0 <= value < size):
        raise _refusal(f"{name}_token_id", value, f"a token id under {size}")
    return value


def _around(metadata: Mapping[str, Any], name: str, default: bool, special: Mapping[str, str]) -> str | None:
    if not metadata.get(f"tokenizer.ggml.add_{name}_token", default):
        return None
    if f"{name}_token" not in special:
        raise CheckpointError(
            f"tokenizer.ggml.add_{name}_token is true, but there is no tokenizer.ggml.{name}_token_id"
        )
    return special[f"{name}_token"]


def _refusal(name: str, value: Any, taken: str) -> CheckpointError:
    return CheckpointError(f"tokenizer.ggml.{name} is {reprlib.repr(value)}; taken: {taken}")
