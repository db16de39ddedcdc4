"""What one instruction of a compiled program asks of a chip: operations, main memory traffic, bytes over the links."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection

from .hlo import Array, Computation, Instruction, Module

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "optimization-barrier", "iota"),
    *("partition-id", "replica-id", "while", "conditional", "call", "broadcast"),
)
_SLICES = ("dynamic-slice", "slice", "gather")
_WRITES = {"dynamic-update-slice": 1, "scatter": 2}  # in place: operand 0 stays, this operand is what is written


@dataclasses.dataclass(frozen=True)
class Collective:
    """Its kind, the bytes of its larger side per chip, and what leaves a chip.

    In a ring of a group of g a reduction sends 2 (g - 1) / g of its bytes, a permute all, the others (g - 1) / g.
    """

    kind: str
    size: int
    sent: float


def collectives(module: Module, x: Instruction, devices: int) -> list[Collective]:
    """Those that an instruction is, or holds in a fusion. One that goes on beside other work counts where it starts."""
    if x.opcode.endswith("-done"):
        return []
    found = [y for y in (_collective(x, devices),) if y is not None]
    for name in x.called("calls"):
        inner = module.computations[name].instructions.values()
        if _goes_on(name, inner):
            continue
        for y in inner:
            one = _collective(y, devices)
            if one is not None and "all-reduce-scatter" in name:  # a reduction of which each chip keeps its part
                one = dataclasses.replace(one, kind="reduce-scatter", sent=one.sent / 2)
            found += [] if one is None else [one]
    return found


def _goes_on(name: str, inner: Collection[Instruction]) -> bool:
    """Whether a fusion's collective was started by an earlier one."""
    ends = any("AsyncCollectiveDone" in x.attributes for x in inner)
    return ends or "async_collective_fusion" in name and not any("AsyncCollectiveStart" in x.attributes for x in inner)


def _collective(x: Instruction, devices: int) -> Collective | None:
    kind = x.opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
        return None
    g = group_size(x, devices)
    if x.opcode in ("all-gather-start", "collective-permute-start"):  # operand and result
        size = max((a.bytes for a in x.arrays), default=0)
    else:
        size = sum(a.bytes for a in x.arrays) * (g if kind == "reduce-scatter" else 1)
    share = 1.0 if kind.startswith("collective") else (g - 1) / g * (2 if kind == "all-reduce" else 1)
    return Collective(kind, size, size * share)


def group_size(x: Instruction, devices: int) -> int:
    """Chips in each of a collective's groups, by any of the ways in which HLO writes them; all `devices` if none."""
    text = x.attributes
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", text):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", text):
        return int(found[2])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", text):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
        return math.prod(int(sizes[name]) for name in re.findall(r"'([^']+)'", found[2]))
    return devices


def main_bytes(module: Module, computation: Computation, x: Instruction) -> int:
    """Bytes of main memory that it reads and writes: of a slice what it takes, of a write in place what is new."""
    if x.opcode in _FREE or x.opcode.endswith("-done"):
        return 0
    operands = [
        computation.instructions[name] for name in dict.fromkeys(x.operands) if name in computation.instructions
    ]
    if x.opcode in ("copy-start", "slice-start") or x.opcode == "async-start" and not collectives(module, x, 1):
        moved = min((a.bytes for a in x.arrays[:2]), default=0)
        return moved * sum(a.main for a in x.arrays[:2])
    if x.opcode == "custom-call" and (claimed := estimate(x)):
        near = sum(a.bytes for y in (*operands, x) for a in y.arrays if not a.main)
        return max(0, claimed["bytes_accessed"] - near)
    if x.opcode == "fusion":
        inner = module.computations[x.called("calls")[0]]
        read = 0
        for place, name in enumerate(x.operands):
            source = computation.instructions.get(name)
            if source is not None and any(a.main for a in source.arrays):
                read += _read(module, inner, inner.parameters[place].name)
        return read + _written(module, inner, x.arrays)
    if x.opcode in _SLICES:
        return sum(a.bytes * (a.main + any(b.main for b in operands[0].arrays)) for a in x.arrays)
    if x.opcode in _WRITES:
        new = computation.instructions[x.operands[_WRITES[x.opcode]]]
        return sum(a.bytes * (a.main + 1) for a in new.arrays)
    return sum(a.bytes for y in (*operands, x) for a in y.arrays if a.main)


def operations(module: Module, computation: Computation, x: Instruction) -> float:
    """Multiplications and additions of its matrix products; a kernel's are what its cost estimate claims."""
    if x.opcode == "fusion":
        inner = module.computations[x.called("calls")[0]]
        return sum(operations(module, inner, y) for y in inner.instructions.values())
    shapes = [computation.instructions[o].arrays for o in x.operands if o in computation.instructions]
    if x.opcode == "custom-call":
        claimed = estimate(x)
        return claimed["flops"] if claimed else 0
    if x.opcode == "dot":
        contracted = math.prod(shapes[0][0].dims[i] for i in x.numbers("lhs_contracting_dims"))
        return 2 * math.prod(x.arrays[0].dims) * contracted
    return _convolution(x, shapes[0][0], shapes[1][0]) if x.opcode == "convolution" else 0


def estimate(x: Instruction) -> dict[str, int] | None:
    """The flops and bytes_accessed that a kernel was given as its CostEstimate, or None."""
    found = {name: re.search(rf'"{name}":"?(\d+)', x.attributes) for name in ("flops", "bytes_accessed")}
    return {name: int(f[1]) for name, f in found.items() if f} if all(found.values()) else None


def _read(module: Module, inner: Computation, name: str) -> int:
    """Bytes that a fusion reads of a parameter: of one that it only slices, the slices."""
    whole, read = sum(a.bytes for a in inner.instructions[name].arrays), 0
    for user in inner.users[name]:
        if user.opcode in _SLICES and user.operands[0] == name:
            read += sum(a.bytes for a in user.arrays)
        elif user.opcode == "bitcast":
            read += _read(module, inner, user.name)
        elif user.opcode == "fusion":
            nested = module.computations[user.called("calls")[0]]
            places = [i for i, o in enumerate(user.operands) if o == name]
            read += sum(_read(module, nested, nested.parameters[i].name) for i in places)
        elif user.opcode in _WRITES and user.operands[0] == name or user.opcode == "tuple":
            continue
        else:
            return whole
    return min(read, whole)


def _written(module: Module, inner: Computation, arrays: tuple[Array, ...]) -> int:
    """Bytes that a fusion writes: all of its result, or of one that is written in place, what is new."""
    roots = [inner.root]
    if inner.root.opcode == "tuple":
        roots = [inner.instructions[o] for o in inner.root.operands]
    total = 0
    for root, array in zip(roots, arrays, strict=False):
        while root.opcode == "bitcast":
            root = inner.instructions[root.operands[0]]
        if root.opcode in _WRITES:
            total += sum(a.bytes for a in inner.instructions[root.operands[_WRITES[root.opcode]]].arrays)
        elif root.opcode == "parameter":
            continue
        elif root.opcode == "fusion":
            total += _written(module, module.computations[root.called("calls")[0]], (array,))
        else:
            total += array.bytes * array.main
    return total


def _convolution(x: Instruction, left: Array, right: Array) -> float:
    """A product as TPUs have it: features are contracted, batch dimensions may stand as windows over the input."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", x.attributes)
    if labels is None:
        return 0
    window = re.search(r"window=\{([^}]*)\}", x.attributes)
    fields = dict(part.split("=") for part in window[1].split()) if window else {}
    of = lambda name, default: fields.get(name, "x".join([default] * 9)).split("x")  # noqa: E731
    total = 2 * math.prod(x.arrays[0].dims[labels[3].index(c)] for c in "bf") * right.dims[labels[2].index("i")]
    groups = x.number("batch_group_count") or 1
    for d in range(len(labels[1]) - 2):
        size, out = right.dims[labels[2].index(str(d))], x.arrays[0].dims[labels[3].index(str(d))]
        stride, spread, dilate = (int(of(n, "1")[d]) for n in ("stride", "lhs_dilate", "rhs_dilate"))
        low, there = int(of("pad", "0_0")[d].split("_")[0]), left.dims[labels[1].index(str(d))]
        at = (i * stride + k * dilate - low for i in range(out) for k in range(size))
        total *= sum(p % spread == 0 and 0 <= p // spread < there for p in at)
    return total / groups
