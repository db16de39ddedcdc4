"""One call of a rollout engine: slots that fill, rows that finish, batches that shrink."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Bool, Int, UInt32

from spec_jax.control.cost import CostModel
from spec_jax.engine import rows
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.measure import measure_cost
from spec_jax.engine.requests import stack
from spec_jax.engine.state import EngineState, Finish
from spec_jax.rollout import compact
from spec_jax.rollout.programs import Programs, bound, without_drafts
from spec_jax.rollout.records import Carried, Rollout, Segment
from spec_jax.rollout.switch import Always, Switch, Toggled, pace
from spec_jax.rollout.toggle import RoundCost, Toggle


class Run:
    """Samples of prompts, in the order given, on batches of compiled sizes.

    keys are the rows' own; places say where each prompt is remembered. What the call leaves is in `carried`.
    """

    def __init__(
        self,
        engine: Engine,
        programs: Programs,
        params: Callable[[int, bool], EngineParams],
        carried: Carried,
        sizes: Sequence[int],
        prefill_rows: int,
        toggle: Toggle | None,
        requests: Sequence[rows.Requests],
        keys: UInt32[np.ndarray, "n 2"],
        places: Int[np.ndarray, "g"],
        order: Sequence[int],
        budget: int,
        pad_id: int,
        column: str,
    ) -> None:
        """Set up; nothing runs yet."""
        n = len(keys)
        self.engine, self.programs, self.params, self.carried = engine, programs, params, carried
        self.sizes, self.prefill_rows, self.column = tuple(sizes), prefill_rows, column
        self.switch: Switch = Always() if toggle is None else Toggled(engine, toggle, carried)
        self.requests, self.keys, self.places, self.group = requests, keys, places, n // len(requests)
        self.order, self.ready = list(order), []
        self.size = compact.next_size(self.sizes, n)
        self.on, self.told = self.switch.pays(self.sizes.index(self.size)), False
        self.slots = np.full(self.size, -1)
        self.tokens, self.mask = np.full((n, budget), pad_id, np.int32), np.zeros((n, budget), bool)
        self.log_probs = np.zeros((n, budget), np.float32)
        self.finish, self.rounds = np.full(n, int(Finish.RUNNING), np.int32), np.zeros(n, np.int32)
        self.segments: list[Segment] = []
        given = carried.kept
        if given is None:
            given = programs.fresh(params(self.size, True))
        target = params(self.size, True).target
        given, carried.memory = bound(given, target), bound(carried.memory, target)
        carried.kept = None  # the arrays are given away: should this call fail, the next begins anew
        begun = programs.begin(params(self.size, True), self.size, given)
        self.state: EngineState = bound(begun, target)

    def warm_up(self) -> None:
        """Compile what batches of this size need and measure their rounds; the run itself is of no further use."""
        self._fill()
        self._tell()
        self._measure()
        params, done = self.params(self.size, True), np.ones(self.size, bool)
        state = self.programs.decode(params, self.state, 0, until_running=0)
        if self.switch.plain:
            state = self.programs.plain(self.params(self.size, False), state, 0, until_running=0)
        for size in (s for s in self.sizes if s < self.size):
            self.programs.shrink(params, state, size)
        at = np.full(self.size, -1, np.int32)
        self.programs.kept(params, state)
        self.programs.settle(state, self.carried.memory, at, done, np.int32(self.carried.version))

    @property
    def waiting(self) -> bool:
        """Whether a row has no slot yet."""
        return bool(self.order) or any(self.ready)

    @property
    def busy(self) -> int:
        """How many slots are taken."""
        return int((self.slots >= 0).sum())

    def until(self, until_running: int) -> Rollout:
        """Run to the end, or until so few rows run."""
        while True:
            self._fill()
            if not self.waiting and self.busy <= until_running:
                break
            self._measure()
            begin, index, compiled = time.perf_counter(), self.sizes.index(self.size), self.programs.count
            segment, width = self._segment(index, self._floor(until_running))
            if not self.waiting:
                self._compact()
            seconds = time.perf_counter() - begin if self.programs.count == compiled else None
            self.switch.observe(index, segment, width, seconds)
        self._collect(self.slots >= 0)
        self.carried.kept = self.programs.kept(self.params(self.size, True), self.state)
        return Rollout(self.tokens, self.mask, self.log_probs, self.finish, self.rounds, tuple(self.segments))

    def _floor(self, until_running: int) -> int:
        """How few rows may run before the host looks again: slots to fill, a smaller size to move to, or the end."""
        if self.waiting:
            return max(self.busy - max(1, self.size // 8), 0)
        smaller = [s for s in self.sizes if s < min(self.busy, self.size)]
        return max(until_running, smaller[-1] if smaller else 0)

    def _fill(self) -> None:
        free = np.flatnonzero(self.slots < 0).tolist()
        while free and self.waiting:
            if not any(self.ready):
                self._prefill()
            slots, keys = np.full(self.prefill_rows, self.size, np.int32), np.zeros((self.prefill_rows, 2), np.uint32)
            for i, samples in enumerate(self.ready):
                if samples and free:
                    row, slots[i] = samples.pop(0), free.pop(0)
                    keys[i], self.slots[slots[i]] = self.keys[row], row
            self.state = self.programs.put(self.state, slots, self.fresh, keys)
            self.told = False

    def _prefill(self) -> None:
        some, self.order = self.order[: self.prefill_rows], self.order[self.prefill_rows :]
        padded = [*some, *[some[0]] * (self.prefill_rows - len(some))]
        params = self.params(self.size if self.on else 0, True)
        self.fresh = self.programs.prefill(params, stack([self.requests[i] for i in padded]))
        self.ready = [list(range(i * self.group, (i + 1) * self.group)) for i in some]

    def _segment(self, index: int, floor: int) -> tuple[Segment, float]:
        """Rounds until the host has to look, what finished taken, and the mean width that was verified."""
        on, bound = self.switch.decide(self.size, index)
        self.on = on
        r, own = self.state.rows, self.slots >= 0
        before = jax.device_get((r.length, r.counters.rounds, r.counters.scored))
        begin = time.perf_counter()
        if on:
            self._tell()
        program = self.programs.decode if on else self.programs.plain
        self.state = program(self.params(self.size, on), self.state, bound, until_running=floor)
        r = self.state.rows
        *after, finish = jax.device_get((r.length, r.counters.rounds, r.counters.scored, r.finish))
        seconds = time.perf_counter() - begin
        tokens, passes, scored = ((new - old)[own] for new, old in zip(after, before, strict=True))
        rounds, total = int(passes.max()), int(passes.sum())
        done = own & (finish != Finish.RUNNING)
        given = (rounds, total, int(tokens.sum()), seconds, pace(tokens, done[own], rounds, self.waiting))
        self.segments.append(Segment(self.size, self.busy, on, *given))
        if done.any():
            self._settle(done)
        return self.segments[-1], float(scored.sum()) / max(total, 1)

    def _tell(self) -> None:
        """Before rows draft, tell them what is remembered of their prompts by now."""
        if not self.told and self.carried.memory is not None:
            self.state = self.programs.tell(self.state, self.carried.memory, self._at)
        self.told = True

    @property
    def _at(self) -> Int[np.ndarray, "b"]:
        """Where the prompt of each slot is remembered; -1 for a free one."""
        return np.where(self.slots >= 0, self.places[np.maximum(self.slots, 0) // self.group], -1).astype(np.int32)

    def _settle(self, done: Bool[np.ndarray, "b"]) -> None:
        """Take what finished rows give, and free their slots."""
        self._collect(done)
        given = (self.carried.memory, self._at, done, np.int32(self.carried.version))
        self.state, self.carried.memory = self.programs.settle(self.state, *given)
        self.slots[done] = -1
        self.told = False

    def _collect(self, which: Bool[np.ndarray, "b"]) -> None:
        if not which.any():
            return
        r = self.state.rows
        wanted = (r.tokens, r.length, r.prompt_length, r.finish, r.counters.rounds, getattr(r, self.column))
        tokens, length, begin, finish, rounds, logs = jax.device_get(wanted)
        for slot in np.flatnonzero(which):
            row, count = self.slots[slot], length[slot] - begin[slot]
            span = slice(begin[slot], length[slot])
            self.tokens[row, :count], self.log_probs[row, :count] = tokens[slot, span], logs[slot, span]
            self.mask[row, :count] = True
            self.finish[row], self.rounds[row] = finish[slot], rounds[slot]

    def _compact(self) -> None:
        """Move to the smallest size that holds what runs."""
        size = compact.next_size(self.sizes, max(self.busy, 1))
        if self.busy and size < self.size:
            self.state = self.programs.shrink(self.params(self.size, True), self.state, size)
            left = self.slots[self.slots >= 0]
            self.size, self.slots = size, np.full(size, -1)
            self.slots[: len(left)] = left

    def _measure(self) -> None:
        """What rounds take at this size, if somebody asks and nobody has said so."""
        asked = self.switch.plain or (self.engine.controller.uses_cost and len(self.engine.widths) > 1)
        if not asked or self.size in self.carried.costs:
            return

        def time_of(engine: Engine, program: Callable[..., EngineState], on: bool) -> CostModel:
            decode = lambda params, state, rounds: program(params, state, rounds, until_running=0)  # noqa: E731
            return measure_cost(engine, self.params(self.size, on), self.state, decode)

        table = plain = time_of(self.engine, self.programs.decode, True)
        if self.switch.plain:
            plain = time_of(without_drafts(self.engine), self.programs.plain, False)
        self.carried.costs[self.size] = RoundCost(plain.seconds[0], table)
        self.carried.measured.add(self.size)
