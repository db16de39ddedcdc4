"""Texts to train a drafter on, on disk: token ids and loss masks in shards that appear whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int
from safetensors.numpy import load_file, save_file

_ABOUT = "about.json"


@dataclasses.dataclass(frozen=True)
class Text:
    """A text: its number, its tokens, and which of them the loss counts (the target's own)."""

    number: int
    tokens: Int[np.ndarray, "t"]
    mask: Bool[np.ndarray, "m"]


class Store:
    """A folder of shards. Tokens take 2 bytes (4 for vocabularies over 65,536), masks a bit.

    about: what the texts are, as JSON: vocab_size, and whatever else must be the same for more texts to join them.
    """

    def __init__(self, directory: str | Path, about: Mapping[str, Any]) -> None:
        """Open a folder, making it if it is not there.

        Raises ValueError, naming the entry, if it holds texts of another kind.
        """
        self.directory, self.about = Path(directory), json.loads(json.dumps(dict(about)))
        if not isinstance(about.get("vocab_size"), int):
            raise ValueError(f"about: got {dict(about)}, takes an entry vocab_size, the number of token ids")
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / _ABOUT
        if not path.exists():
            _write(path, json.dumps(self.about, indent=1).encode())
        found = json.loads(path.read_text(encoding="utf-8"))
        for name in sorted(found.keys() | self.about.keys()):
            if found.get(name) != self.about.get(name):
                raise ValueError(
                    f"{name}: got {self.about.get(name)!r}, takes {found.get(name)!r}, as the texts in {self.directory}"
                )

    @classmethod
    def existing(cls, directory: str | Path) -> Store:
        """Open a folder of texts as it is; FileNotFoundError if there is none."""
        path = Path(directory) / _ABOUT
        if not path.exists():
            raise FileNotFoundError(f"directory: {directory} holds no texts")
        return cls(directory, json.loads(path.read_text(encoding="utf-8")))

    def append(self, texts: Sequence[Text]) -> None:
        """Write a shard; nothing for no texts. Raises ValueError for a token outside the vocabulary."""
        if not texts:
            return
        vocab = self.about["vocab_size"]
        for text in texts:
            if len(text.tokens) != len(text.mask):
                raise ValueError(f"texts: got {len(text.tokens)} tokens and {len(text.mask)} mask entries")
            if len(text.tokens) and not (text.tokens.min() >= 0 and text.tokens.max() < vocab):
                raise ValueError(f"texts: got token ids outside 0 .. {vocab - 1} in text {text.number}")
        arrays = {
            "tokens": np.concatenate([t.tokens for t in texts]).astype(np.uint16 if vocab <= 1 << 16 else np.uint32),
            "mask": np.packbits(np.concatenate([t.mask for t in texts])),
            "length": np.array([len(t.tokens) for t in texts], np.int64),
            "number": np.array([t.number for t in texts], np.int64),
        }
        path = self.directory / f"{len(self._shards()):06d}.safetensors"
        part = path.with_suffix(".part")
        save_file(arrays, part)
        os.replace(part, path)

    def numbers(self) -> set[int]:
        """The numbers of all texts."""
        return {int(n) for path in self._shards() for n in load_file(path)["number"]}

    def read(self) -> list[Text]:
        """All texts, by number, whatever the order they were written in."""
        found: list[Text] = []
        for path in self._shards():
            shard = load_file(path)
            mask = np.unpackbits(shard["mask"], count=len(shard["tokens"])).astype(bool)
            ends = np.cumsum(shard["length"])
            for number, begin, end in zip(shard["number"], ends - shard["length"], ends, strict=True):
                found.append(Text(int(number), shard["tokens"][begin:end].astype(np.int32), mask[begin:end]))
        return sorted(found, key=lambda text: text.number)

    def _shards(self) -> list[Path]:
        return sorted(self.directory.glob("[0-9]*.safetensors"))


def counted(texts: Iterable[Text]) -> int:
    """How many tokens the loss counts."""
    return sum(int(text.mask.sum()) for text in texts)


def _write(path: Path, data: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    os.replace(part, path)
