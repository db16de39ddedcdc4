"""Prompts from JSON lines: read, checked, and turned into requests."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spec_jax.engine.engine import Engine
from spec_jax.engine.requests import request
from spec_jax.models.tokenizer import Tokenizer
from spec_jax.sampling.settings import Sampling

_SETTINGS = tuple(f.name for f in dataclasses.fields(Sampling))
FIELDS = ("id", "prompt", "messages", "max_new_tokens", "seed", "stop", *_SETTINGS)
_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class Line:
    """A line as it stands in a file; `where` is file:line, `index` its number among all lines of all files."""

    index: int
    where: str
    id: str
    fields: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request: what the text depends on beside the model, and the digest of all of that and of the model."""

    index: int
    where: str
    id: str
    ids: tuple[int, ...]
    max_new_tokens: int
    key: int
    sampling: Sampling
    stop: tuple[str, ...]
    digest: str


def read(patterns: Sequence[str]) -> list[Line]:
    """The lines of files, or of all files that match a glob, in the order of the names.

    Raises FileNotFoundError for a name or glob without a file, and ValueError naming every line, as file:line, that is
    no JSON object, has no id or one that came before, or has fields that are not taken.
    """
    lines, problems, first = [], [], {}
    for path in [path for pattern in patterns for path in _files(pattern)]:
        for number, raw in enumerate(path.read_bytes().split(b"\n"), 1):
            if not raw.strip():
                continue
            where = f"{path}:{number}"
            try:
                line = _line(len(lines), where, raw)
                if line.id in first:
                    raise ValueError(f"id: got {line.id!r}, which {first[line.id]} has already")
            except ValueError as error:
                problems.append(f"{where}: {error}")
                continue
            first[line.id] = where
            lines.append(line)
    _raise(problems)
    if not lines:
        raise ValueError(f"prompts: got no lines in {', '.join(patterns)}, takes at least one")
    return lines


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What a line leaves open.

    seed: a line without one has its own drawn from this and its id, so that it doesn't depend on the lines around it.
    sampling: settings that a line changes one by one. max_new_tokens: None is up to max_len, the longest text.
    model: a digest of the model.
    """

    seed: int
    sampling: Sampling
    max_new_tokens: int | None
    max_len: int
    model: str


def ask(lines: Sequence[Line], tokenizer: Tokenizer | None, defaults: Defaults) -> list[Asked]:
    """The requests of lines, encoded; ValueError naming every line with a value that is not taken."""
    asked, problems = [], []
    for line in lines:
        try:
            asked.append(_ask(line, tokenizer, defaults))
        except (ValueError, TypeError) as error:
            problems.append(f"{line.where}: {error}")
    _raise(problems)
    return asked


def check(asked: Sequence[Asked], engine: Engine, eos: Sequence[int]) -> None:
    """Raise ValueError naming every line whose request the engine would not take."""
    problems = []
    for a in asked:
        try:
            request(engine, a.ids, a.max_new_tokens, key=a.key, sampling=a.sampling, eos=eos)
        except ValueError as error:
            problems.append(f"{a.where}: {error}")
    _raise(problems)


def digest(value: Any) -> str:
    """SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _files(pattern: str) -> list[Path]:
    names = sorted(glob.glob(pattern, recursive=True)) if glob.has_magic(pattern) else [pattern]
    files = [Path(name) for name in names if Path(name).is_file()]
    if not files:
        raise FileNotFoundError(f"prompts: {pattern} is no file and matches none")
    return files


def _line(index: int, where: str, raw: bytes) -> Line:
    try:
        fields = json.loads(raw, object_pairs_hook=_once)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"holds a {type(fields).__name__}, takes an object")
    if unknown := sorted(fields.keys() - set(FIELDS)):
        raise ValueError(f"got fields {', '.join(unknown)}, takes {', '.join(FIELDS)}")
    name = fields.get("id")
    if isinstance(name, bool) or not isinstance(name, str | int) or name == "":
        raise ValueError(f"id: got {name!r}, takes a string or an integer")
    if ("prompt" in fields) == ("messages" in fields):
        raise ValueError("prompt, messages: takes one of the two")
    return Line(index, where, str(name), fields)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of these names and values; of a name that is there twice one would be lost."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = sorted({name for name, _ in pairs if [n for n, _ in pairs].count(name) > 1})
        raise ValueError(f"{', '.join(twice)} is there more than once")
    return fields


def _ask(line: Line, tokenizer: Tokenizer | None, defaults: Defaults) -> Asked:
    fields = line.fields
    changes = {name: fields[name] for name in _SETTINGS if name in fields}
    if "logit_bias" in changes:
        changes["logit_bias"] = {_token(token): x for token, x in _of(fields, "logit_bias", dict).items()}
    if "banned_tokens" in changes:
        changes["banned_tokens"] = tuple(_of(fields, "banned_tokens", list))
    own = dataclasses.replace(defaults.sampling, **changes)
    ids = _encode(fields, tokenizer)
    budget = fields.get("max_new_tokens", defaults.max_new_tokens)
    budget = defaults.max_len - len(ids) if budget is None else budget
    if isinstance(budget, bool) or not isinstance(budget, int):
        raise ValueError(f"max_new_tokens: got {budget!r}, takes an integer")
    key = fields.get("seed")
    if key is None:
        key = int.from_bytes(hashlib.sha256(f"{defaults.seed}:{line.id}".encode()).digest()[:8], "big")
    if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key < 2**64:
        raise ValueError(f"seed: got {key!r}, takes an integer in 0 .. 2**64 - 1")
    stop = tuple(_of(fields, "stop", list)) if "stop" in fields else ()
    if not all(isinstance(s, str) and s for s in stop):
        raise ValueError(f"stop: got {list(stop)!r}, takes a list of strings that are not empty")
    if stop and tokenizer is None:
        raise ValueError("stop: got strings, and the model has no tokenizer to find them with")
    settings = dataclasses.asdict(own) | {"logit_bias": sorted(own.logit_bias.items())}
    whole = digest([defaults.model, ids, budget, key, settings, stop])
    return Asked(line.index, line.where, line.id, tuple(ids), budget, key, own, stop, whole[:16])


def _token(name: str) -> int:
    if not name.isdecimal():
        raise ValueError(f"logit_bias: got {name!r}, takes token ids as names")
    return int(name)


def _encode(fields: dict[str, Any], tokenizer: Tokenizer | None) -> list[int]:
    prompt = fields.get("prompt")
    if isinstance(prompt, list):
        if not all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
            raise ValueError("prompt: got a list with other things than integers, takes token ids or a text")
        return prompt
    if tokenizer is None:
        raise ValueError("prompt, messages: got text, takes token ids in prompt (the model has no tokenizer)")
    if "prompt" in fields:
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f"prompt: got {prompt!r}, takes a text that is not empty, or a list of token ids")
        return list(tokenizer.encode(prompt))
    messages = _of(fields, "messages", list)
    if not messages or not all(
        isinstance(m, dict) and all(isinstance(m.get(name), str) for name in ("role", "content")) for m in messages
    ):
        raise ValueError(f"messages: got {messages!r}, takes a list of objects with role and content, which are texts")
    return list(tokenizer.encode(tokenizer.apply_chat(messages), special=False))


def _of(fields: dict[str, Any], name: str, kind: type) -> Any:
    if not isinstance(fields[name], kind):
        raise ValueError(f"{name}: got {fields[name]!r}, takes {'an object' if kind is dict else 'a list'}")
    return fields[name]


def _raise(problems: list[str]) -> None:
    if problems:
        more = f" and {len(problems) - _SHOWN} more lines" if len(problems) > _SHOWN else ""
        raise ValueError("; ".join(problems[:_SHOWN]) + more)
