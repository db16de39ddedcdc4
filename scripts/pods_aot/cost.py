"""A round's cost, read from its compiled program: loops count as often as they turn, a branch where it is taken."""

from __future__ import annotations

import dataclasses

from . import traffic
from .chips import Chip
from .hlo import Instruction, Module, parse
from .loops import Scope, trips


@dataclasses.dataclass(frozen=True)
class Cost:
    """Per chip: operations, main memory traffic, bytes of collectives by kind, their number, and seconds by a roofline.

    A computation's own instructions take the longer of their operations at the chip's peak and their memory traffic at
    its bandwidth, since copies run beside products; what its collectives send is added, as is each loop's body, as
    often as it turns. Latencies are left out. unknown: loops that count once, since data say how often they turn.
    """

    operations: float = 0.0
    main_bytes: float = 0.0
    collective_bytes: dict[str, float] = dataclasses.field(default_factory=dict)
    collectives: float = 0.0
    sent_bytes: float = 0.0
    seconds: float = 0.0
    unknown: tuple[str, ...] = ()

    def __add__(self, other: Cost) -> Cost:
        """One after the other."""
        kinds = {**self.collective_bytes, **other.collective_bytes}
        both = {k: self.collective_bytes.get(k, 0) + other.collective_bytes.get(k, 0) for k in kinds}
        plain = ("operations", "main_bytes", "collectives", "sent_bytes", "seconds", "unknown")
        return Cost(collective_bytes=both, **{name: getattr(self, name) + getattr(other, name) for name in plain})

    def times(self, n: int) -> Cost:
        """So often."""
        plain = ("operations", "main_bytes", "collectives", "sent_bytes", "seconds")
        scaled = {name: n * getattr(self, name) for name in plain}
        return Cost(
            **scaled, collective_bytes={k: n * v for k, v in self.collective_bytes.items()}, unknown=self.unknown
        )


def cost(text: str, chip: Chip, devices: int, branches: dict[int, int] | None = None) -> Cost:
    """The cost of a compiled program's text on one of its `devices` chips.

    branches: which branch a switch of so many takes; of others the one that takes longest counts.
    """
    module = parse(text)
    return _computation(module, Scope(module.computations[module.entry]), chip, devices, branches or {})


def _computation(module: Module, scope: Scope, chip: Chip, devices: int, branches: dict[int, int]) -> Cost:
    own, inside = Cost(), Cost()
    below = lambda name, caller=None: _computation(  # noqa: E731
        module, Scope(module.computations[name], caller, scope if caller else None), chip, devices, branches
    )
    for x in scope.computation.instructions.values():
        if x.opcode == "while":
            turns = trips(module, x, scope)
            body = below(x.called("body")[0], x) + below(x.called("condition")[0], x)
            inside += body.times(1 if turns is None else turns)
            inside += Cost(unknown=(x.op_name,) if turns is None else ())
        elif x.opcode == "conditional":
            names = x.called("branch_computations") or x.called("true_computation") + x.called("false_computation")
            costs = [below(name) for name in names]
            inside += costs[branches[len(names)]] if len(names) in branches else max(costs, key=lambda c: c.seconds)
        elif x.opcode == "call":
            inside += below(x.called("to_apply")[0])
        else:
            own += _instruction(module, scope, x, devices)
    busy = max(own.operations / chip.operations, own.main_bytes / chip.bandwidth)
    return dataclasses.replace(own, seconds=busy + own.sent_bytes / chip.links) + inside


def _instruction(module: Module, scope: Scope, x: Instruction, devices: int) -> Cost:
    found, kinds = traffic.collectives(module, x, devices), {}
    for c in found:
        kinds[c.kind] = kinds.get(c.kind, 0) + c.size
    return Cost(
        operations=traffic.operations(module, scope.computation, x),
        main_bytes=traffic.main_bytes(module, scope.computation, x),
        collective_bytes=kinds,
        collectives=len(found),
        sent_bytes=sum(c.sent for c in found),
    )
