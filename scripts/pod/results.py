"""Lines of JSON that survive a kill: written whole, repaired at the next start, put in order at the end."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

_NAME = re.compile(r"results-(\d{5,})\.jsonl")


def path_of(folder: Path, host: int, kind: str = "results") -> Path:
    """A host's file."""
    return folder / f"{kind}-{host:05d}.jsonl"


class Lines:
    """A file of JSON lines that one process appends to."""

    def __init__(self, path: Path) -> None:
        """Open or make the file, and cut off a last line that is not whole; ValueError if another run holds it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise ValueError(f"--out: another run writes to {path}") from None
        repair(path)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record; when this returns, a kill of the process does not lose it."""
        data = (json.dumps(record) + "\n").encode()
        while data:
            data = data[os.write(self._file, data) :]

    def __enter__(self) -> Lines:
        """For `with`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the file back, written through to the disk."""
        os.fsync(self._file)
        os.close(self._file)


def repair(path: Path) -> None:
    """Cut off what stands behind the last newline: the part of a line that was being written."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        at = end
        while at:
            begin = max(0, at - 65536)
            file.seek(begin)
            cut = file.read(at - begin).rfind(b"\n")
            if cut >= 0:
                at = begin + cut + 1
                break
            at = begin
        if at < end:
            file.truncate(at)


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file, half a line at its end left out; ValueError naming file:line for what is none."""
    records = []
    for number, raw in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            record = json.loads(raw)
            if not isinstance(record, dict) or not {"id", "request"} <= record.keys():
                raise ValueError("not a result")
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}; the file is damaged: mend or remove it") from error
        records.append(record)
    return records


def finished(folder: Path, host: int, hosts: int) -> dict[str, str]:
    """id -> digest of what this host, and hosts that are no more, have finished in a folder.

    The files of the latter are repaired; this host's own is, if it writes one, when it is opened.
    """
    done: dict[str, str] = {}
    for path in sorted(folder.glob("results-*.jsonl")):
        match = _NAME.fullmatch(path.name)
        if match is None or int(match[1]) != host and int(match[1]) < hosts:
            continue
        if int(match[1]) >= hosts:
            repair(path)
        done |= {r["id"]: r["request"] for r in read(path)}
    return done


def order(path: Path, place: Mapping[str, int]) -> None:
    """Put a file's records in the order of `place`, others behind; the file changes as a whole or not at all."""
    records = read(path)
    ordered = sorted(records, key=lambda r: place.get(r["id"], len(place)))
    if ordered != records:
        part = path.with_name(f".{path.name}.part")
        part.write_text("".join(json.dumps(r) + "\n" for r in ordered))
        os.replace(part, path)
