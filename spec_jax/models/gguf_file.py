"""The GGUF container: metadata and a table of tensors, read with every count and offset checked against the file.

Format: the GGUF specification of ggml, versions 2 and 3, little-endian. The reader of the `gguf` package trusts the
file's counts and makes an array object per element; this one allocates no more than a few times the header's bytes.
"""

from __future__ import annotations

import dataclasses
import math
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from spec_jax.models.checkpoint import CheckpointError

_SCALARS = dict(enumerate("BbHhIif?", start=0)) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LARGEST_HEADER = 1 << 26
_DEFAULT_ALIGNMENT = 32


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor on disk, in numpy's (reversed) order of dimensions; `read` gives it as float32."""

    path: Path
    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    size: int

    def read(self) -> np.ndarray:
        """Dequantise; CheckpointError if the file has become shorter."""
        with open(self.path, "rb") as file:
            data = np.fromfile(file, np.uint8, self.size, offset=self.offset)
        if len(data) != self.size:
            raise CheckpointError(f"{self.path}: cut off inside tensor {self.name}")
        return dequantize(data.reshape(*self.shape[:-1], -1), self.type).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """Metadata (numbers, strings, lists of strings, numpy arrays of numbers) and tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read a GGUF file's header.

    Raises FileNotFoundError, or CheckpointError if it is cut off, has counts or offsets that can't be, names twice,
    tensors that overlap, or a tensor type that can't be dequantised.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    with open(path, "rb") as file:
        try:
            return _Header(path, file).parse()
        except (_Malformed, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: {error}") from error


class _Malformed(Exception):
    pass


class _Header:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file, self.place = path, file, "the header"
        self.size = os.fstat(file.fileno()).st_size

    def parse(self) -> GgufFile:
        if (magic := self.take(4)) != b"GGUF":
            raise _Malformed(f"starts with {magic!r}; taken: b'GGUF'")
        if (version := self.scalar("I")) not in (2, 3):
            raise _Malformed(f"GGUF version is {version}; taken: 2 or 3, little-endian")
        tensors, entries = self.count("tensors", 24), self.count("metadata entries", 13)
        metadata: dict[str, Any] = {}
        for i in range(entries):
            self.place = f"metadata entry {i}"
            self.place = f"metadata entry {(key := self.string())!r}"
            if key in metadata:
                raise _Malformed(f"{self.place} is there twice")
            metadata[key] = self.value(self.scalar("I"))
        table: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for i in range(tensors):
            self.place = f"tensor {i}"
            self.place = f"tensor {(name := self.string())!r}"
            if name in table:
                raise _Malformed(f"{self.place} is there twice")
            if not 1 <= (dimensions := self.scalar("I")) <= 4:
                raise _Malformed(f"{self.place} has {dimensions} dimensions; taken: 1 to 4")
            shape = tuple(self.scalar("Q") for _ in range(dimensions))[::-1]
            table[name] = shape, self.scalar("I"), self.scalar("Q")
        return GgufFile(metadata, self.place_tensors(table, metadata.get("general.alignment", _DEFAULT_ALIGNMENT)))

    def place_tensors(
        self, table: dict[str, tuple[tuple[int, ...], int, int]], alignment: Any
    ) -> dict[str, GgufTensor]:
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise _Malformed(f"general.alignment is {alignment!r}; taken: a power of two up to 2**20")
        start = -(-self.file.tell() // alignment) * alignment
        tensors = {}
        for name, (shape, kind, offset) in table.items():
            tensor_type = _readable(kind)
            if tensor_type is None:
                raise _Malformed(f"tensor {name!r} has a type, {kind}, that can't be dequantised")
            block, block_bytes = GGML_QUANT_SIZES[tensor_type]
            if 0 in shape or shape[-1] % block:
                raise _Malformed(f"tensor {name!r} has shape {shape}; taken: positive, the last a multiple of {block}")
            size = math.prod(shape) // block * block_bytes
            if offset % alignment:
                raise _Malformed(f"tensor {name!r} is at offset {offset}, which is not aligned to {alignment}")
            if start + offset + size > self.size:
                raise _Malformed(f"tensor {name!r} ends at byte {start + offset + size}, the file at {self.size}")
            tensors[name] = GgufTensor(self.path, name, shape, tensor_type, start + offset, size)
        ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
        for left, right in zip(ordered, ordered[1:], strict=False):
            if left.offset + left.size > right.offset:
                raise _Malformed(f"tensors {left.name!r} and {right.name!r} overlap")
        return tensors

    def take(self, size: int) -> bytes:
        end = self.file.tell() + size
        if end > self.size:
            raise _Malformed(f"cut off in {self.place}: needs {end} bytes, the file has {self.size}")
        if end > _LARGEST_HEADER:
            raise _Malformed(f"{self.place} makes the header longer than {_LARGEST_HEADER >> 20} MiB")
        return self.file.read(size)

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def count(self, what: str, smallest: int) -> int:
        n = self.scalar("Q")
        if n * smallest > self.size:
            raise _Malformed(f"claims {n} {what} in {self.size} bytes")
        return n

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise _Malformed(f"{self.place} has the unknown type {kind}")
        kind = self.scalar("I")
        if kind == _STRING:
            return [self.string() for _ in range(self.count("strings", 8))]
        if kind not in _SCALARS:
            raise _Malformed(f"{self.place} is an array of type {kind}; taken: numbers or strings")
        dtype = np.dtype(f"<{_SCALARS[kind]}")
        return np.frombuffer(self.take(self.count("numbers", dtype.itemsize) * dtype.itemsize), dtype)


def _readable(kind: int) -> GGMLQuantizationType | None:
    try:
        tensor_type = GGMLQuantizationType(kind)
        dequantize(np.zeros((1, GGML_QUANT_SIZES[tensor_type][1]), np.uint8), tensor_type)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return tensor_type
