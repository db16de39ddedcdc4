"""The text of one request as it grows: whole characters only, stop strings, nothing shown that may be taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

T = TypeVar("T", str, list[int])


class TextStream(Protocol):
    """Turns token ids into text as they come (`models.tokenizer.StreamDecoder`)."""

    def push(self, ids: Sequence[int]) -> str:
        """Text that is now certain."""
        ...

    def flush(self) -> str:
        """The rest."""
        ...


class GrowingText:
    """Text from tokens, cut at the first stop string that is complete after at least `min_new` tokens."""

    def __init__(self, stream: TextStream, stop_strings: Sequence[str] = (), min_new: int = 0) -> None:
        """Start an empty text."""
        self.text = ""
        self.stopped_after: int | None = None
        self._stream, self._stops, self._min_new = stream, list(stop_strings), min_new
        self._tokens = self._shown = self._searched = 0

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens; returns the new text that is sure to stay. Tokens after a stop string are left out."""
        for token in tokens:
            if self.stopped_after is None:
                self._tokens += 1
                self._grow(self._stream.push([token]))
        return self._show(len(self.text) - held_back(self.text, self._stops))

    def finish(self) -> str:
        """The text still held back; no more will come."""
        if self.stopped_after is None:
            self._grow(self._stream.flush())
        return self._show(len(self.text))

    def _grow(self, piece: str) -> None:
        self.text += piece
        while found := [(at, s) for s in self._stops if (at := self.text.find(s, self._searched)) >= 0]:
            at, _ = min(found)
            if self._tokens >= self._min_new:
                self.text, self.stopped_after = self.text[:at], self._tokens
                return
            self._searched = at + 1

    def _show(self, end: int) -> str:
        end = max(end if self.stopped_after is None else len(self.text), self._shown)
        new, self._shown = self.text[self._shown : end], end
        return new


def held_back(text: T, stops: Sequence[T]) -> int:
    """Length of the longest end of the text that a stop (strings, or token lists) begins with but does not end with."""
    longest = max((len(s) for s in stops), default=0) - 1
    for n in range(min(longest, len(text)), 0, -1):
        if any(len(s) > n and s[:n] == text[-n:] for s in stops):
            return n
    return 0
