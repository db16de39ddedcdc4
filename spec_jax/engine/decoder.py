"""The engine for people: prompts in, text out, rows coming and going, streamed in chunks."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from spec_jax import noise
from spec_jax.control.cost import CostModel
from spec_jax.engine import devices, rows
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.measure import measure_cost
from spec_jax.engine.programs import programs
from spec_jax.engine.requests import request
from spec_jax.engine.saved import load, save
from spec_jax.engine.state import Counters, EngineState, Finish
from spec_jax.engine.text import GrowingText, held_back
from spec_jax.models import placement
from spec_jax.sampling.constraint import Constraint, bank, free
from spec_jax.sampling.settings import Sampling

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished request.

    tokens are all that was emitted, an ending end-of-sequence token or stop sequence included; text leaves those out.
    finish is "eos", "stop", "budget", "max_len", "invalid" (NaN logits, or no token allowed) or "closed".
    Log-probs stand per token, under the model alone (raw) and under the request's settings; None if not recorded,
    and NaN for tokens that came with the request (`generated`).
    """

    id: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str | None
    finish: str
    raw_log_probs: tuple[float, ...] | None
    log_probs: tuple[float, ...] | None
    counters: dict[str, Any]

    @property
    def acceptance_length(self) -> float:
        """Tokens per target pass."""
        return self.counters["emitted"] / max(1, self.counters["rounds"])


@dataclasses.dataclass(frozen=True)
class Update:
    """What a chunk brought for one request: new tokens, new text that is sure to stay, and the result once finished."""

    id: int
    tokens: tuple[int, ...]
    text: str
    result: Result | None


@dataclasses.dataclass
class _Job:
    """A request on the host: waiting, or in a slot."""

    id: int
    prompt: tuple[int, ...]
    arrays: rows.Requests
    group: int
    stop_strings: tuple[str, ...]
    text: GrowingText | None = None
    sent: int = 0
    shown: int = 0


class Decoder:
    """Runs requests on one compiled engine with `batch` slots.

    Six programs are compiled at most, whatever the requests: prefill, empty slots, placing a row, a chunk of rounds,
    and closing and releasing a row.
    Decoders of an equal engine and batch size share them. The host is touched once a chunk.
    """

    def __init__(
        self,
        engine: Engine,
        target_params: Any,
        drafter_params: Any = None,
        tokenizer: Any = None,
        batch: int = 1,
        eos: Sequence[int] | None = None,
        constraints: Sequence[Constraint] = (),
        cost: CostModel | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        """Set up the slots.

        Args:
            engine: the static pieces and sizes.
            target_params: the target's parameters.
            drafter_params: the drafter's parameters.
            tokenizer: a spec_jax tokenizer; without one prompts are token ids, and results have no text.
            batch: number of slots.
            eos: end-of-sequence ids of every request that names none; None takes the tokenizer's.
            constraints: the constraints that requests may name by index.
            cost: time of a round by width; None measures it when a request first runs, if the controller uses it.
            mesh: devices to split models and rows over (`placement.make_mesh`); None takes the target's, if it has one.
                In a job of many processes each makes the same calls, and all get all results.

        Raises:
            ValueError: for a batch that the mesh's "data" axis does not divide, a target that can't be split, or
                anything else that does not fit, naming it.
        """
        if mesh is not None:
            engine = placement.with_mesh(engine, mesh)
            if devices.mesh_of(engine) is None:
                named = type(engine.target).__name__
                raise ValueError(f"mesh: got one with the target {named}, takes one with a Llama or Qwen")
        if not isinstance(batch, int) or batch < 1:
            raise ValueError(f"batch: got {batch!r}, takes an integer of at least 1")
        self._mesh = devices.mesh_of(engine)
        if self._mesh is not None and batch % (rows_split := self._mesh.shape[placement.DATA]):
            raise ValueError(f"batch: got {batch} slots, takes a multiple of the mesh's {rows_split} along data")
        vocab = engine.target.vocab_size
        if tokenizer is not None and tokenizer.vocab_size > vocab:
            raise ValueError(f"tokenizer: got one of {tokenizer.vocab_size} ids, takes at most the target's {vocab}")
        for i, c in enumerate(constraints):
            if c.classes.shape[0] != vocab:
                raise ValueError(f"constraints[{i}]: got one for {c.classes.shape[0]} token ids, takes one for {vocab}")
        table, self._constraint_starts = bank(list(constraints)) if constraints else (free(vocab), [])
        measured = engine.controller.uses_cost and len(engine.widths) > 1
        self._cost = cost if cost is not None or measured else CostModel((1,), (1.0,))
        costs = jnp.ones(len(engine.widths)) if self._cost is None else self._cost.at(engine.widths)
        self.engine, self.batch, self.tokenizer = engine, batch, tokenizer
        self.params = devices.place(engine, EngineParams(target_params, drafter_params, table, costs))
        self._eos = tuple(eos) if eos is not None else tuple(getattr(tokenizer, "eos_token_ids", ()) or ())
        empty = functools.partial(rows.empty, engine, batch=batch)
        places = None if self._mesh is None else devices.shardings(engine, jax.eval_shape(empty, self.params))
        shared = programs(engine, batch, places)
        self._prefill, self._empty, self._place = shared.prefill, shared.empty, shared.place
        self._close, self._release, self._decode = shared.close, shared.release, shared.decode
        self._state: EngineState = self._empty(self.params)
        self._waiting: deque[_Job] = deque()
        self._slots: list[_Job | None] = [None] * batch
        self._prefilled: tuple[int, EngineState] | None = None
        self._dropped: list[_Job] = []
        self._next_id = 0

    @property
    def cost(self) -> CostModel | None:
        """The time of a round by width that the controller goes by; None until measured."""
        return self._cost

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting) or any(self._slots) or bool(self._dropped)

    @property
    def programs(self) -> int:
        """Number of compiled programs so far, shared ones included; constant once each kind of call has been made."""
        return sum(_compiled(f) for f in (self._prefill, self._place, self._close, self._release, self._decode))

    def submit(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int | None = None,
        *,
        n: int = 1,
        key: Array | int = 0,
        sampling: Sampling | None = None,
        eos: Sequence[int] | None = None,
        stops: Sequence[Sequence[int]] = (),
        stop_strings: Sequence[str] = (),
        constraint: int | None = None,
        generated: Sequence[int] = (),
    ) -> list[int]:
        """Queue a prompt, to be sampled n times; returns the requests' ids.

        A prompt in text is encoded as it stands (see `Tokenizer.apply_chat`). Sample i has the key
        `noise.sample_key(key, i)`. stop_strings are looked for in the text at chunk edges, stops (token sequences)
        inside the compiled program. `generated` goes on from tokens that an earlier run emitted.

        Raises:
            ValueError: for anything that does not fit the engine, naming the argument; nothing is queued then.
        """
        if not isinstance(n, int) or n < 1:
            raise ValueError(f"n: got {n!r}, takes an integer of at least 1")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("prompt: got text, takes token ids (the decoder has no tokenizer)")
            prompt = list(self.tokenizer.encode(prompt))
        if stop_strings and self.tokenizer is None:
            raise ValueError("stop_strings: got strings, takes none (the decoder has no tokenizer)")
        if isinstance(stop_strings, str) or not all(isinstance(s, str) and s for s in stop_strings):
            raise ValueError(f"stop_strings: got {stop_strings!r}, takes a sequence of strings that are not empty")
        if constraint is not None and not 0 <= constraint < len(self._constraint_starts):
            raise ValueError(f"constraint: got {constraint}, takes an index below {len(self._constraint_starts)}")
        start = 0 if constraint is None else self._constraint_starts[constraint]
        first, jobs = noise.request_key(key), []
        for i in range(n):
            arrays = request(
                self.engine,
                prompt,
                max_new_tokens,
                key=noise.sample_key(first, i),
                sampling=sampling,
                eos=self._eos if eos is None else eos,
                stops=stops,
                constraint_start=start,
                generated=generated,
            )
            job = _Job(self._next_id + i, tuple(int(t) for t in prompt), arrays, self._next_id, tuple(stop_strings))
            self._start_text(job)
            jobs.append(job)
        self._next_id += n
        self._waiting.extend(jobs)
        return [job.id for job in jobs]

    def run(self, chunk_rounds: int = 16) -> Iterator[Update]:
        """Serve what is queued until nothing is left; yields what each chunk brought. Requests may be added between."""
        if not isinstance(chunk_rounds, int) or chunk_rounds < 1:
            raise ValueError(f"chunk_rounds: got {chunk_rounds!r}, takes an integer of at least 1")
        while self.busy:
            yield from self.step(chunk_rounds)

    def prefill(self) -> None:
        """Fill free slots now and wait for it, instead of in the next step."""
        self._fill()
        jax.block_until_ready(self._state)

    def step(self, chunk_rounds: int = 16) -> list[Update]:
        """Fill free slots, run one chunk, and return what it brought."""
        self._fill()
        if self._cost is None and any(self._slots):
            self._cost = measure_cost(self.engine, self.params, self._state, self._decode)
            params = dataclasses.replace(self.params, cost=self._cost.at(self.engine.widths))
            self.params = devices.place(self.engine, params)
        self._state = self._decode(self.params, self._state, chunk_rounds)
        return self._collect()

    def generate(
        self, prompts: Sequence[str | Sequence[int]], max_new_tokens: int | None = None, **options: Any
    ) -> list[Result]:
        """Results for the prompts, in their order (n results each, if n is given); options as for `submit`."""
        if isinstance(prompts, str):
            raise ValueError("prompts: got one string, takes a sequence of prompts")
        mark = len(self._waiting)
        try:
            ids = [i for prompt in prompts for i in self.submit(prompt, max_new_tokens, **options)]
        except ValueError:
            while len(self._waiting) > mark:
                self._waiting.pop()
            raise
        done = {u.id: u.result for u in self.run() if u.result is not None}
        return [done[i] for i in ids]

    def close(self, id: int) -> None:
        """End a request early; its result comes with the next chunk, with finish "closed"."""
        for job in self._waiting:
            if job.id == id:
                self._waiting.remove(job)
                self._dropped.append(job)
                return
        for slot, job in enumerate(self._slots):
            if job is not None and job.id == id:
                self._state = self._close(self._state, self._given(jnp.array([slot])))
                return
        raise ValueError(f"id: got {id}, takes the id of a request that waits or runs")

    def forget(self) -> None:
        """Drop what drafter and controller have learned from earlier requests; takes a decoder that is idle.

        Earlier outputs change how fast later requests are, never what they emit: a benchmark that asks for a text twice
        without this measures how well it is remembered.
        """
        if self.busy:
            raise ValueError("forget: got a decoder with requests, takes an idle one")
        self._state = self._empty(self.params)

    def save(self, path: str) -> None:
        """Write the running requests to a file, to go on from with `restore` in another process."""
        if self._waiting:
            raise ValueError(f"save: got {len(self._waiting)} waiting requests, takes running ones only; step first")
        jobs = [
            None
            if job is None
            else {
                "id": job.id,
                "prompt": job.prompt,
                "stop_strings": job.stop_strings,
                "sent": job.sent,
                "shown": job.shown,
            }
            for job in self._slots
        ]
        save(path, self.engine, self._state, {"jobs": jobs, "next_id": self._next_id})

    def restore(self, path: str) -> None:
        """Go on from a file that `save` wrote, on an engine of the same sizes; each token is still delivered once."""
        if self.busy:
            raise ValueError("restore: got a decoder with requests, takes an idle one")
        state, notes = load(path, self._state)
        self._state, self._next_id = devices.put(self.engine, state), notes["next_id"]
        for slot, job in enumerate(notes["jobs"]):
            if job is None:
                continue
            arrays = jax.tree.map(lambda x, slot=slot: x[slot : slot + 1], _as_requests(state))
            new = _Job(job["id"], tuple(job["prompt"]), arrays, job["id"], tuple(job["stop_strings"]), sent=job["sent"])
            self._start_text(new)
            if new.text is not None:
                begin = int(state.rows.prompt_length[slot])
                new.shown = job["shown"]
                new.text.push(np.asarray(state.rows.tokens[slot, begin : begin + new.shown]).tolist())
            self._slots[slot] = new

    def _given(self, arrays: T) -> T:
        """Small arrays as a program takes them: on a mesh the host's values, the same in every process."""
        return arrays if self._mesh is None else jax.device_get(arrays)

    def _start_text(self, job: _Job) -> None:
        if self.tokenizer is not None:
            min_new = int(job.arrays.sampling.min_new[0])
            job.text = GrowingText(self.tokenizer.stream(), job.stop_strings, min_new)

    def _fill(self) -> None:
        for slot in range(self.batch):
            if self._slots[slot] is None and self._waiting:
                job = self._waiting.popleft()
                if self._prefilled is None or self._prefilled[0] != job.group:
                    self._prefilled = job.group, self._prefill(self.params, self._given(job.arrays))
                slots, arrays = self._given((jnp.array([slot]), job.arrays))
                self._state = self._place(self._state, slots, self._prefilled[1], arrays)
                self._slots[slot] = job
        if not self._waiting:
            self._prefilled = None

    def _collect(self) -> list[Update]:
        r = self._state.rows
        wanted = (r.tokens, r.length, r.prompt_length, r.finish, r.counters, r.raw_log_probs, r.log_probs)
        tokens, length, prompt_length, finish, counters, raw, law = jax.device_get(wanted)
        updates = [Update(job.id, (), "", _never_ran(job)) for job in self._dropped]
        self._dropped = []
        for slot, job in enumerate(self._slots):
            if job is None:
                continue
            begin, end = prompt_length[slot], length[slot]
            emitted = [int(t) for t in tokens[slot, begin:end]]
            reason, text = Finish(int(finish[slot])), ""
            if job.text is not None:
                stops = [[t for t in stop if t >= 0] for stop in np.asarray(job.arrays.stops[0]).tolist()]
                visible = _visible(emitted, reason, [s for s in stops if s])
                text = job.text.push(emitted[job.shown : visible])
                job.shown = max(job.shown, visible)
                if job.text.stopped_after is not None:
                    reason, emitted = Finish.STOP, emitted[: job.text.stopped_after]
                if reason != Finish.RUNNING:
                    text += job.text.finish()
            new = emitted[job.sent :]
            job.sent += len(new)
            result = None
            if reason != Finish.RUNNING:
                span = slice(begin, begin + len(emitted))
                logs = [None if x is None else tuple(float(v) for v in x[slot, span]) for x in (raw, law)]
                result = Result(
                    job.id,
                    job.prompt,
                    tuple(emitted),
                    None if job.text is None else job.text.text,
                    reason.name.lower(),
                    logs[0],
                    logs[1],
                    {f: np.asarray(getattr(counters, f)[slot]).tolist() for f in counters.__dataclass_fields__},
                )
                self._state = self._release(self._state, self._given(jnp.array([slot])))
                self._slots[slot] = None
            if new or result:
                updates.append(Update(job.id, tuple(new), text, result))
        return updates


def _compiled(f: Any) -> int:
    return f._cache_size()


def _never_ran(job: _Job) -> Result:
    """The result of a request that was closed while it waited."""
    text = None if job.text is None else ""
    counters = {f: 0 for f in Counters.__dataclass_fields__}
    return Result(job.id, job.prompt, (), text, Finish.CLOSED.name.lower(), None, None, counters)


def _visible(emitted: list[int], reason: Finish, stops: list[list[int]]) -> int:
    """How many tokens belong to the text: not a final end-of-sequence token, nor a stop sequence or a start of one."""
    if reason == Finish.RUNNING:
        return len(emitted) - held_back(emitted, stops)
    if reason == Finish.EOS:
        return len(emitted) - 1
    if reason == Finish.STOP:
        return len(emitted) - max(len(s) for s in stops if emitted[-len(s) :] == s)
    return len(emitted)


def _as_requests(state: EngineState) -> rows.Requests:
    return rows.Requests(**{f: getattr(state.rows, f) for f in rows.Requests.__dataclass_fields__})
