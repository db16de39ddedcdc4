"""Text to token ids and back, whole or as a stream, on top of the `tokenizers` library."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from spec_jax.models.chat import render_chat
from spec_jax.models.checkpoint import CheckpointError, read_json

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
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
        special=False: the template has written BOS itself.
        """
        return self.backend.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD, and ids without a token (padding rows) nothing."""
        ids = list(map(int, ids))
        if any(not 0 <= i < 2**32 for i in ids):
            raise ValueError(f"ids holds {next(i for i in ids if not 0 <= i < 2**32)}; taken: token ids, 0 or more")
        return self.backend.decode(ids, skip_special_tokens=skip_special)

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
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._context: list[int] = []  # ids already emitted, enough for the decoder to know that the text goes on
        self._pending: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """Take new ids; returns the text that is now certain, maybe none."""
        return "".join(map(self._push, ids))

    def flush(self) -> str:
        """The text held back; afterwards the decoder starts a new text."""
        text = self._new_text()
        self._context, self._pending = [], []
        return text

    def _push(self, token: int) -> str:
        self._pending.append(token)
        text = self._new_text()
        if text.endswith("\ufffd") or _BYTE_TOKEN.fullmatch(self._tokenizer.backend.id_to_token(token) or ""):
            return ""
        alone = self._decode(self._pending)
        self._context, self._pending = ([] if alone else self._context) + self._pending, []
        return text

    def _new_text(self) -> str:
        return self._decode(self._context + self._pending)[len(self._decode(self._context)) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)


def frame(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make the backend put these tokens around a text, and no others."""
    missing = [token for token in (bos, eos) if token is not None and backend.token_to_id(token) is None]
    if missing:
        raise CheckpointError(f"the vocabulary has no token {', '.join(map(repr, missing))} to put around texts")
    single = [token for token in (bos, "$A", eos) if token is not None]
    special = {token: backend.token_to_id(token) for token in (bos, eos) if token is not None}
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(special.items()))  # pyright: ignore


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path}: {error}") from error


def _token_text(token: Any, name: str, path: Path) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise CheckpointError(f"{path}: {name} is {token!r}; taken: a string or an object with `content`")
    return text


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
