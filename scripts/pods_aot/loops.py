"""How often the loops of a compiled program turn, where that does not depend on data."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from .hlo import Computation, Instruction, Module

_PASSED_ON = ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done", "optimization-barrier")


@dataclasses.dataclass(frozen=True)
class Scope:
    """A computation on its way from the entry; `caller` is the while instruction whose body or condition it is."""

    computation: Computation
    caller: Instruction | None = None
    parent: Scope | None = None

    def source(self, name: str) -> Instruction | None:
        """The instruction behind copies and the like."""
        x = self.computation.instructions.get(name)
        while x is not None and x.opcode in _PASSED_ON:
            x = self.computation.instructions.get(x.operands[0])
        return x

    def carried(self, name: str) -> int | None:
        """Which of the loop's carried values an instruction is."""
        x = self.source(name)
        if x is None or x.opcode != "get-tuple-element":
            return None
        whole = self.computation.instructions[x.operands[0]]
        return x.number("index") if whole.opcode == "parameter" else None

    def value(self, name: str | int) -> int | None:
        """The integer that an instruction is: a constant, or what a loop carries at first."""
        if isinstance(name, int):
            return name
        x = self.source(name)
        if x is None:
            return None
        if x.opcode == "constant":
            return int(x.operands[0]) if re.fullmatch(r"-?\d+", x.operands[0]) else None
        at = self.carried(name)
        if at is None or self.caller is None or self.parent is None:
            return None
        start = self.parent.source(self.caller.operands[0])
        return self.parent.value(start.operands[at]) if start is not None and start.opcode == "tuple" else None


def trips(module: Module, loop: Instruction, scope: Scope) -> int | None:
    """How often a while loop in `scope` turns; None where that depends on data.

    It is what the compiler notes, or follows from a carried counter that is compared with a number. A loop that may
    also end earlier, whose condition is an `and`, counts in full.
    """
    if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
        return int(noted[1])
    condition = Scope(module.computations[loop.called("condition")[0]], loop, scope)
    body = Scope(module.computations[loop.called("body")[0]], loop, scope)
    for direction, counter, bound in _comparisons(module, condition.computation):
        if direction in ("GT", "GE"):
            counter, bound = bound, counter
        at = None if isinstance(counter, int) else condition.carried(counter)
        first, last = condition.value(counter), condition.value(bound)
        if at is None or first is None or last is None or direction not in ("LT", "LE", "GT", "GE"):
            continue
        more = direction in ("LE", "GE")
        return max(0, -(-(last + more - first) // _step(body, at)))
    return None


def _comparisons(module: Module, condition: Computation) -> Iterator[tuple[str, str | int, str | int]]:
    """Direction and operands of every comparison; those inside a fusion as the fusion's operands, or numbers."""
    for x in condition.instructions.values():
        if x.opcode == "compare":
            a, b = x.operands
            yield _direction(x), a, b
        for name in x.called("calls") if x.opcode == "fusion" else ():
            inner = Scope(module.computations[name])
            for y in inner.computation.instructions.values():
                if y.opcode == "compare":
                    a, b = (_outside(inner, x, operand) for operand in y.operands)
                    yield _direction(y), a, b


def _direction(x: Instruction) -> str:
    found = re.search(r"direction=(\w+)", x.attributes)
    return found[1] if found else ""


def _outside(inner: Scope, fusion: Instruction, name: str) -> str | int:
    x, number = inner.source(name), inner.value(name)
    if number is not None or x is None:
        return name if number is None else number
    return fusion.operands[int(x.operands[0])] if x.opcode == "parameter" else name


def _step(body: Scope, at: int) -> int:
    """By how much a carried counter grows; 1 if that is not plain to see."""
    root = body.computation.root
    new = body.source(root.operands[at]) if root.opcode == "tuple" else None
    if new is None or new.opcode != "add":
        return 1
    values = [body.value(o) for o in new.operands if body.carried(o) != at]
    return values[0] if len(values) == 1 and values[0] else 1
