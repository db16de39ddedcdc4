"""The text to train on: the sources of the running Python's standard library (PSF licence)."""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from collections.abc import Iterable
from pathlib import Path

# Tables and generated text, the same on no two machines or of no use as text; what is installed beside the library.
_LEFT_OUT = ("site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__", "config-*", "_sysconfigdata*")
_TESTS = ("test", "tests", "idle_test")
_HELD_OUT_OF = 20


@dataclasses.dataclass(frozen=True)
class Source:
    """A file: its path below the library's folder, with slashes, and its text."""

    name: str
    text: str


def stdlib_sources(tests: bool = False, root: Path | None = None) -> list[Source]:
    """Every .py file of the standard library in the order of its name; with `tests`, those of its test suite too.

    Left out: character tables (encodings), generated help (pydoc_data, _sysconfigdata), files that are not UTF-8 or
    empty. The list depends on nothing but the folder `root` (the running Python's library).
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    left_out = _LEFT_OUT + (() if tests else _TESTS)
    found = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if any(Path(part).match(pattern) for part in inside.parts for pattern in left_out):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            found.append(Source(inside.as_posix(), text.replace("\r\n", "\n")))
    if not found:
        raise FileNotFoundError(f"root: {root} holds no Python sources")
    return found


def is_held_out(name: str) -> bool:
    """Whether a file is kept from training: one in twenty, by a hash of its name, the same on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % _HELD_OUT_OF == 0


def split(sources: Iterable[Source]) -> tuple[list[Source], list[Source]]:
    """Files to train on and files held out; no test is held out, so that the measure is the same with and without."""
    train, held_out = [], []
    for source in sources:
        if not is_held_out(source.name):
            train.append(source)
        elif not any(Path(part).match(pattern) for part in Path(source.name).parts for pattern in _TESTS):
            held_out.append(source)
    return train, held_out


def fingerprint(sources: Iterable[Source]) -> str:
    """A hash of names and texts."""
    digest = hashlib.sha256()
    for source in sources:
        for part in (source.name, source.text):
            data = part.encode()
            digest.update(b"%d " % len(data) + data)
    return digest.hexdigest()[:16]
