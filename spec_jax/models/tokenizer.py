"""Text to token ids and back, whole or as a stream, on top of the `tokenizers` library."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import tokenizers
from tokenizers import decoders, processors

from spec_jax.models.chat import render_chat
from spec_jax.models.checkpoint import CheckpointError, read_json

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
# How byte-level vocabularies write a byte: printable ones as themselves, the others, in order, from U+0100 on.
_BYTE_SPELLING = {b: chr(b) for b in _PRINTABLE} | {
    b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in _PRINTABLE)
}
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A tokenizer of the `tokenizers` library with the model's special tokens and chat template.

    special_tokens: names such as `bos_token` to their text, as chat templates use them.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """Wrap a backend; a truncation or padding that it was saved with is turned off."""
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.eos_token_ids = tuple(eos_token_ids)
        self._unspelled = _bytes_without_token(backend)

    @classmethod
    def from_directory(cls, directory: str | Path, eos_token_ids: Sequence[int] = ()) -> Tokenizer:
        """Read tokenizer.json, and tokenizer_config.json and chat_template.jinja if they are there.

        Without `eos_token_ids` the only one is that of the config's `eos_token`. Raises CheckpointError for files that
        are damaged or contradict each other.
        """
        directory = Path(directory)
        path, config_path = directory / "tokenizer.json", directory / "tokenizer_config.json"
        backend = _load_backend(path)
        config = read_json(config_path) if config_path.exists() else {}
        special = {name: text for name in _SPECIAL if (text := _token_text(config.get(name), name, config_path))}
        for number, token in _mapping(config.get("added_tokens_decoder"), config_path).items():
            text = _token_text(token, "added_tokens_decoder", config_path)
            if text is None or str(backend.token_to_id(text)) != number:
                raise CheckpointError(f"{config_path}: token {number} is {text!r}, which {path.name} does not hold")
        if "add_bos_token" in config or "add_eos_token" in config:
            bos = special.get("bos_token") if config.get("add_bos_token") else None
            eos = special.get("eos_token") if config.get("add_eos_token") else None
            frame(backend, bos, eos)
        tokenizer = cls(backend, special, _chat_template(directory, config), eos_token_ids)
        for name in special.keys() & {"bos_token", "eos_token"}:
            if backend.token_to_id(special[name]) is None:
                raise CheckpointError(f"{config_path}: {name} is {special[name]!r}, which {path.name} does not hold")
        if not eos_token_ids and "eos_token" in special:
            tokenizer.eos_token_ids = (tokenizer.token_id(special["eos_token"]),)
        return tokenizer

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id; an embedding may have more rows."""
        return max(self.backend.get_vocab().values(), default=-1) + 1

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text; `special` adds the tokens, such as BOS, that the model wants around every text.

        A special token spelled out in the text becomes that token in any case. Text from `apply_chat` is encoded with
        special=False: the template has written BOS itself. ValueError for a character that the vocabulary can't spell,
        which the library, and so transformers, leaves out.
        """
        if self._unspelled and not self._unspelled.isdisjoint(text.encode()):
            lost = next(char for char in text if not self._unspelled.isdisjoint(char.encode()))
            raise ValueError(f"text holds {lost!r}; taken: characters whose bytes all have tokens in this vocabulary")
        return self.backend.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Iterable[SupportsIndex], skip_special: bool = False) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD, and ids without a token (padding rows) nothing."""
        numbers = list(map(operator.index, ids))
        if wrong := [i for i in numbers if not 0 <= i < 2**32]:
            raise ValueError(f"ids holds {wrong[0]}; taken: token ids, 0 or more")
        return self.backend.decode(numbers, skip_special_tokens=skip_special)

    def stream(self, skip_special: bool = True) -> StreamDecoder:
        """A decoder for one text that comes token by token."""
        return StreamDecoder(self, skip_special)

    def token_id(self, text: str) -> int:
        """The id of one token, spelled as in the vocabulary; ValueError if there is none."""
        if (number := self.backend.token_to_id(text)) is None:
            raise ValueError(f"text is {text!r}, which is no token of this vocabulary")
        return number

    def apply_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation in the model's chat format, ready for `encode(text, special=False)`.

        `variables` go to the template. ValueError if the checkpoint has no template or the template fails.
        """
        if self.chat_template is None:
            raise ValueError("this checkpoint has no chat template; write the prompt as plain text")
        variables = self.special_tokens | {"add_generation_prompt": add_generation_prompt} | variables
        return render_chat(self.chat_template, messages, **variables)

    def fingerprint(self) -> str:
        """A hash of id -> token: two tokenizers with the same one can share token ids."""
        digest = hashlib.sha256()
        for number, token in sorted((number, token) for token, number in self.backend.get_vocab().items()):
            data = token.encode()
            digest.update(b"%d %d " % (number, len(data)) + data)
        return digest.hexdigest()


class StreamDecoder:
    """Turns token ids into text as they come; the pieces and the final `flush` join to `decode` of all ids.

    A piece is held back while it ends inside a character, or in a run of byte tokens, which the next one may change.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = False) -> None:
        """Start a text."""
        self._tokenizer = tokenizer
        added = tokenizer.backend.get_added_tokens_decoder()
        self._skipped = {i for i, token in added.items() if token.special} if skip_special else set()
        self._context: list[int] = []  # ids already emitted, enough for the decoder to know that the text goes on
        self._pending: list[int] = []

    def push(self, ids: Iterable[SupportsIndex]) -> str:
        """Take new ids; returns the text that is now certain, maybe none."""
        return "".join(map(self._push, map(operator.index, ids)))

    def flush(self) -> str:
        """The text held back; afterwards the decoder starts a new text."""
        text = self._new_text()
        self._context, self._pending = [], []
        return text

    def _push(self, token: int) -> str:
        spelling = self._tokenizer.backend.id_to_token(token)
        if spelling is None or token in self._skipped:
            return ""
        self._pending.append(token)
        text = self._new_text()
        if text.endswith("\ufffd") or _BYTE_TOKEN.fullmatch(spelling):
            return ""
        alone = self._tokenizer.decode(self._pending)
        self._context, self._pending = ([] if alone else self._context) + self._pending, []
        return text

    def _new_text(self) -> str:
        decode = self._tokenizer.decode
        return decode(self._context + self._pending)[len(decode(self._context)) :]


def frame(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make the backend put these tokens around a text, and no others."""
    missing = [token for token in (bos, eos) if token is not None and backend.token_to_id(token) is None]
    if missing:
        raise CheckpointError(f"the vocabulary has no token {', '.join(map(repr, missing))} to put around texts")
    single = [token for token in (bos, "$A", eos) if token is not None]
    special = {token: backend.token_to_id(token) for token in (bos, eos) if token is not None}
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(special.items()))  # pyright: ignore


def _bytes_without_token(backend: tokenizers.Tokenizer) -> frozenset[int]:
    if not isinstance(backend.decoder, decoders.ByteLevel):
        return frozenset()
    vocabulary = backend.get_vocab()
    return frozenset(byte for byte, spelling in _BYTE_SPELLING.items() if spelling not in vocabulary)


@contextlib.contextmanager
def library_errors(what: object) -> Iterator[None]:
    """Turn whatever the `tokenizers` library raises over bad data, a Rust panic included, into CheckpointError."""
    try:
        yield
    except (CheckpointError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # plain Exception, and a panic is not even that
        raise CheckpointError(f"{what}: {error}") from error


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    with library_errors(path):
        return tokenizers.Tokenizer.from_file(str(path))


def _token_text(token: Any, name: str, path: Path) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not (isinstance(text, str) and _is_unicode(text)):
        raise CheckpointError(f"{path}: {name} is {token!r}; taken: a string or an object with `content`")
    return text


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _mapping(value: Any, path: Path) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{path}: added_tokens_decoder is {value!r}; taken: an object")
    return value or {}


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    try:
        template = path.read_text("utf-8") if path.is_file() else config.get("chat_template")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if isinstance(template, list):
        named = [
            entry.get("template") for entry in template if isinstance(entry, dict) and entry.get("name") == "default"
        ]
        template = named[0] if named else template
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{directory}: chat_template is {template!r}; taken: text, or a list with a 'default'")
    return template
