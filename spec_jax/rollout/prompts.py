"""Which prompt has which place in the arrays that outlive a batch: a table of bounded size, the oldest out first."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, UInt8

from spec_jax.checks import check_size

_BYTES = 16


class Prompts:
    """Places 0 .. size - 1 for prompts, by their tokens; a new prompt takes that of the one not seen for longest."""

    def __init__(self, size: int) -> None:
        """An empty table of `size` places."""
        check_size("prompts", size, 1)
        self.size = size
        self._places: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        """How many prompts have a place."""
        return len(self._places)

    def places(self, prompts: Sequence[Sequence[int]]) -> tuple[Int[np.ndarray, "r"], list[int]]:
        """The place of each prompt, and the places that changed hands, whose memory is another prompt's.

        Of more different prompts than there are places, the last ones have none (-1).
        """
        marks = [_digest(p) for p in prompts]
        here, taken = set(marks), []
        for mark in marks:
            if mark in self._places:
                self._places.move_to_end(mark)
        for mark in marks:
            if mark in self._places:
                continue
            if len(self._places) < self.size:
                self._places[mark] = len(self._places)
                continue
            oldest = next(iter(self._places))
            if oldest in here:
                continue
            taken.append(self._places.pop(oldest))
            self._places[mark] = taken[-1]
        return np.array([self._places.get(mark, -1) for mark in marks], np.int32), taken

    def saved(self) -> UInt8[np.ndarray, "p 20"]:
        """The table as an array of `size` rows, the oldest first: fingerprint and place; the rest is zero."""
        table = np.zeros((self.size, _BYTES + 4), np.uint8)
        for row, (mark, place) in zip(table, self._places.items(), strict=False):
            row[:] = np.frombuffer(mark + (place + 1).to_bytes(4, "little"), np.uint8)
        return table

    def restore(self, table: UInt8[np.ndarray, "p 20"]) -> None:
        """Go on with a table that was saved; ValueError for one of another size."""
        if table.shape != (self.size, _BYTES + 4):
            raise ValueError(f"table: got one of {list(table.shape)}, takes [{self.size}, {_BYTES + 4}]")
        self._places.clear()
        for row in np.asarray(table, np.uint8):
            place = int.from_bytes(row[_BYTES:].tobytes(), "little") - 1
            if place >= 0:
                self._places[row[:_BYTES].tobytes()] = place


def _digest(prompt: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.asarray(prompt, np.int64).tobytes(), digest_size=_BYTES).digest()
