"""A compiled program as text (optimised HLO), parsed: computations, their instructions, the arrays these make."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,<=]*)\](\{[^{}]*\})?")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")


@dataclasses.dataclass(frozen=True)
class Array:
    """An array's type, sizes, and whether it lies in the chip's main memory (and not in VMEM or scalar memory)."""

    dtype: str
    dims: tuple[int, ...]
    main: bool

    @property
    def bytes(self) -> int:
        """Its size."""
        bits = _BITS.get(self.dtype)
        if bits is None:
            found = re.search(r"\d+", self.dtype)
            bits = int(found[0]) if found else 0
        return math.prod(self.dims) * bits // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: what it makes (several arrays if a tuple), from which operands, and the text of its attributes."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    def called(self, attribute: str) -> list[str]:
        """The names of computations behind an attribute such as calls, body or branch_computations."""
        found = re.search(rf"\b{attribute}=(?:\{{([^}}]*)\}}|%?([\w.\-]+))", self.attributes)
        if found is None:
            return []
        return [name.strip().lstrip("%") for name in (found[1] or found[2]).split(",")]

    def number(self, attribute: str) -> int | None:
        """The integer behind an attribute."""
        found = re.search(rf"\b{attribute}=(\d+)", self.attributes)
        return int(found[1]) if found else None

    def numbers(self, attribute: str) -> tuple[int, ...]:
        """The integers of an attribute in braces."""
        found = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", self.attributes)
        return tuple(int(x) for x in found[1].split(",") if x) if found else ()

    @property
    def op_name(self) -> str:
        """Where in the traced function it comes from."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else self.name


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in order."""

    name: str
    instructions: Mapping[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        """Its result."""
        return next(x for x in self.instructions.values() if x.is_root)

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """Its parameters, by their numbers."""
        found = [x for x in self.instructions.values() if x.opcode == "parameter"]
        return sorted(found, key=lambda x: int(x.operands[0]))

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that take each one as an operand."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for x in self.instructions.values():
            for operand in dict.fromkeys(x.operands):
                if operand in users:
                    users[operand].append(x)
        return users


@dataclasses.dataclass(frozen=True)
class Module:
    """All computations, and the name of the one that runs."""

    computations: Mapping[str, Computation]
    entry: str


def parse(text: str) -> Module:
    """The program of `compiled.as_text()`. Raises ValueError for text that has no entry computation."""
    computations, entry, name, inside = {}, None, "", {}
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            name, inside = start[2], {}
            entry = name if start[1] else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, inside)
        elif found := _INSTRUCTION.match(line):
            instruction = _instruction(found[2], found[3], bool(found[1]))
            inside[instruction.name] = instruction
    if entry is None or entry not in computations:
        raise ValueError(f"text: got {len(text)} characters without an ENTRY computation, takes a compiled program's")
    return Module(computations, entry)


def _instruction(name: str, rest: str, is_root: bool) -> Instruction:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    opcode, inner = rest[:opening], rest[opening + 1 : closing]
    if opcode in ("parameter", "constant"):
        operands = (inner,)
    else:
        operands = tuple(re.findall(r"%([\w.\-]+)", inner))
    return Instruction(name, opcode, tuple(arrays(shape)), operands, rest[closing + 1 :], is_root)


def arrays(shape: str) -> Iterator[Array]:
    """The arrays of a type as it is written, layouts and all; tuples are flattened."""
    for dtype, dims, layout in _ARRAY.findall(shape):
        sizes = tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)
        yield Array(dtype, sizes, main=re.search(r"S\([1-9]\d*\)", layout) is None)


def _closing(text: str, opening: int) -> int:
    depth = 0
    for found in re.finditer(r"[()]", text[opening:]):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return opening + found.start()
    raise ValueError(f"text: got {text[:80]!r}, takes balanced parentheses")
