"""Rollouts: samples of many prompts on compiled batches that shrink as rows finish, drafts kept between calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, UInt32

from spec_jax import noise
from spec_jax.checks import check_size
from spec_jax.drafters.drafter import memory_of
from spec_jax.engine import devices
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.requests import request
from spec_jax.engine.rows import Requests
from spec_jax.models import placement
from spec_jax.rollout import checks, compact, memory, schedule
from spec_jax.rollout.gated import Gate, Gated, IfDrafted
from spec_jax.rollout.log_probs import recording, teacher_forced
from spec_jax.rollout.programs import Programs, bound, reads
from spec_jax.rollout.prompts import Prompts
from spec_jax.rollout.records import Carried, Rollout, Sync
from spec_jax.rollout.run import Run
from spec_jax.rollout.toggle import RoundCost, Toggle
from spec_jax.sampling.constraint import free
from spec_jax.sampling.settings import Sampling

_observe, _clear, _drop_older = jax.jit(schedule.observe), jax.jit(schedule.clear), jax.jit(memory.drop_older)
_expected = jax.jit(schedule.expected)


class RolloutEngine:
    """Runs rollouts of a policy that changes between calls.

    The text of a row depends on the policy, the settings and the row's key alone: key, call and row number give it, so
    that a rollout with another drafter, other sizes, orders or toggles has the same tokens. What drafting learns lives
    on between calls and policies: earlier outputs by prompt (for `Siblings`, alone or within another drafter), the
    stores and tables that a drafter's rows share, and the controller's calibration.
    """

    def __init__(
        self,
        engine: Engine,
        target_params: Any,
        drafter_params: Any = None,
        *,
        key: Array | int = 0,
        sizes: Sequence[int] = (32,),
        eos: Sequence[int] = (),
        pad_id: int = 0,
        convention: str = "tempered",
        derive: Callable[[Any], Any] | None = None,
        toggle: Toggle | None = None,
        sync: Sync | None = None,
        order: str | schedule.Order = "longest_first",
        prompts: int = 1024,
        prefill_rows: int = 4,
        costs: Mapping[int, RoundCost] | None = None,
    ) -> None:
        """Set up; nothing is compiled or run.

        Args:
            engine: target, drafter, rule, controller and sizes; log-probs are recorded whatever it says. Of a target
                on a mesh of several processes each makes the same calls, and all get all results.
            target_params: the policy; on a mesh its arrays lie there already (`partition.place`).
            drafter_params: the drafter's parameters; not given with `derive`.
            key: seed or key that all calls' keys come from.
            sizes: compiled batch sizes, ascending; rows that wait fill the largest.
            eos: end-of-sequence ids.
            pad_id: stands behind each row's tokens.
            convention: of the log-probs, one of `log_probs.CONVENTIONS`.
            derive: policy -> the drafter's parameters, before the first call behind an update: a quantised policy, say.
            toggle: when to speculate; None: always.
            sync: what a new policy leaves; None: `Sync()`.
            order: "longest_first" starts prompts whose responses were longest, "given" those that come first; a
                function (`schedule.Order`), those whose responses it expects to be longest.
            prompts: prompts that are remembered.
            prefill_rows: prompts prefilled at once.
            costs: by size, what rounds take; None measures it when a size first runs, if toggle or controller asks, and
                goes by the clock from then on.

        Raises:
            ValueError: for anything that does not fit, naming it.
        """
        checks.check_kind("engine", engine, Engine, optional=False)
        self.sizes = compact.check_sizes(sizes)
        check_size("prefill_rows", prefill_rows, 1)
        checks.check_settings(engine, self.sizes, eos, pad_id, derive, toggle, sync, costs)
        checks.check_order(order)
        split = 1 if (mesh := devices.mesh_of(engine)) is None else mesh.shape[placement.DATA]
        for name, given in (("sizes", self.sizes), ("prefill_rows", (prefill_rows,))):
            if any(rows % split for rows in given):
                raise ValueError(f"{name}: got {given}, takes multiples of the mesh's {split} along data")
        if derive is not None and drafter_params is not None:
            raise ValueError("drafter_params: got some with derive, takes one of both")
        size = memory_of(engine.drafter)
        engine = recording(engine, convention)
        self.engine = engine if toggle is None else _gated(engine)
        self._column = "log_probs" if convention == "law" else "raw_log_probs"
        self._key, self.eos, self._pad = noise.request_key(key), tuple(int(e) for e in eos), int(pad_id)
        if self._key.shape != (2,):
            raise ValueError(f"key: got keys of shape {list(self._key.shape)}, takes one key")
        self._toggle, self._sync, self._order = toggle, sync or Sync(), order
        self._prefill_rows, self._derive = prefill_rows, derive
        self._target_params, self._drafter_params, self._changed = target_params, drafter_params, True
        self._known: dict[str, str] | None = None
        self._free = free(self.engine.target.vocab_size)
        self._prompts, self._programs = Prompts(prompts), Programs(self.engine)
        self.calls = 0
        self.carried = Carried(
            memory=memory.empty(prompts, size) if size else None,
            history=schedule.empty(prompts),
            toggle=None if toggle is None else toggle.init(len(self.sizes)),
            costs=dict(costs or {}),
        )

    @property
    def programs(self) -> int:
        """Number of compiled programs so far.

        At most 4, then 5 for each size (6 with a toggle), and 1 for each step from a size down.
        """
        return self._programs.count

    def update_params(self, target_params: Any, drafter_params: Any = None, new: bool = True) -> None:
        """Take a policy, and the drafter's parameters that go with it (None: as they are, or what `derive` makes).

        No array is touched. Nothing that is kept can change a text; `Sync` says what the next call drops. new=False
        says that the policy is the last one, its arrays given again after `release_params`.
        """
        if self._derive is not None and drafter_params is not None:
            raise ValueError("drafter_params: got some, takes none (derive makes them)")
        self._target_params = target_params
        if drafter_params is not None:
            self._drafter_params = drafter_params
        self._changed |= new
        self.carried.version += new

    def release_params(self) -> None:
        """Hold on to the policy's arrays no longer; `update_params` gives them again before the next call."""
        self._target_params = None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        group: int = 1,
        sampling: Sampling | None = None,
        key: Array | int | None = None,
        until_running: int = 0,
        numbers: Sequence[int] | None = None,
    ) -> Rollout:
        """Roll out `group` samples of every prompt.

        A call that is refused moves nothing: neither the keys nor what is carried.

        Args:
            prompts: token ids.
            max_new_tokens: most tokens of a sample.
            group: samples per prompt.
            sampling: settings of all rows; None: temperature 1.
            key: the call's key; None takes the next one of the engine's own, which every such call advances.
            until_running: stop once no more than so many rows run and none waits: a partial rollout, whose unfinished
                rows are marked and whose prompts are the tail.
            numbers: each prompt's number in the call whose rows' keys it takes; None: 0, 1, .. So some prompts of a
                call, rolled out again under its key, say what they said in it.

        Raises:
            ValueError: for anything that does not fit the engine, naming the argument.
        """
        checks.check_call(max_new_tokens, group, sampling)
        check_size("until_running", until_running, 0)
        checks.check_prompts(self.engine, prompts)
        own = checks.check_numbers(numbers, len(prompts), group)
        self._check_policy()
        sampling = Sampling(temperature=1.0) if sampling is None else sampling
        requests = [request(self.engine, p, max_new_tokens, 0, sampling, self.eos) for p in prompts]
        keys = self._row_keys(key, (own[:, None] * group + np.arange(group)).reshape(-1))
        self._take_policy()
        places = self._places(prompts)
        run = self._run(self.carried, requests, keys, places, self._ordered(prompts, places), max_new_tokens)
        rollout = run.until(until_running)
        self.calls += key is None
        at, length = np.repeat(places, group), rollout.length.astype(np.int32)
        self.carried.history = _observe(self.carried.history, at, length)
        return rollout

    def warm_up(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        prompts: int | None = None,
        group: int = 1,
    ) -> None:
        """Compile everything for all sizes, and measure what rounds take if toggle or controller asks.

        Else each program is compiled when a call first needs it, which can be late: a small size, when few rows are
        left. Nothing is remembered of the prompt, and no key is used up. ValueErrors are those of `generate`.

        Args:
            prompt: any that calls may bring.
            max_new_tokens: most tokens of a sample.
            sampling: as `generate`'s.
            prompts: how many prompts a call will have, for what is compiled for their number; None: nothing of that.
            group: samples per prompt.
        """
        checks.check_call(max_new_tokens, group, sampling)
        if prompts is not None:
            check_size("prompts", prompts, 1)
        self._check_policy()
        sampling = Sampling(temperature=1.0) if sampling is None else sampling
        asked = request(self.engine, prompt, max_new_tokens, 0, sampling, self.eos)
        self._take_policy()
        c = self.carried
        for size in self.sizes:
            apart = Carried(jax.tree.map(jnp.copy, c.memory), c.history, c.toggle, c.costs, c.measured, None, c.version)
            keys, places = np.zeros((size, 2), np.uint32), np.zeros(size, np.int32)
            self._run(apart, [asked] * size, keys, places, range(size), max_new_tokens).warm_up()
        self._row_keys(self._key, np.arange(1))
        if prompts is not None:
            self._ordered(None, np.full(prompts, -1, np.int32))
            _observe(c.history, *(np.full(prompts * group, n, np.int32) for n in (-1, 1)))
        if self._toggle is not None and c.toggle is not None:
            self._toggle.decide(c.toggle, 0, 0.0, 0.0)
            self._toggle.observe(c.toggle, 0, True, 1, 1.0, 1.0, 1.0)
        params, left = self.params(self.sizes[0]), jnp.float32(self._sync.calibration)
        self._programs.faded(params, bound(self._programs.fresh(params), params.target), left)
        nowhere = np.full(self._prompts.size, -1, np.int32)
        _clear(c.history, nowhere)
        if c.memory is not None:
            c.memory = bound(c.memory, params.target)
            self._programs.clear(c.memory, nowhere)
            _drop_older(c.memory, np.int32(0))

    def log_probs(
        self, tokens: Int[Array, "b t"], length: Int[Array, "b"], temperature: float = 1.0
    ) -> Float[Array, "b t"]:
        """Teacher-forced tempered log-probs under the current policy (`log_probs.teacher_forced`).

        Raises ValueError for a temperature that no request takes, or where the policy was released.
        """
        Sampling(temperature=temperature)
        self._check_policy()
        return teacher_forced(self.engine.target, self._target_params, tokens, length, temperature)

    def params(self, size: int, drafting: bool = True) -> EngineParams:
        """The parameters of a program at a batch size, 0 for prompts of rows that begin without drafts.

        Those of plain rounds have no drafter's, unless it has to be told of them.
        """
        widths, cost = (self.engine.widths, self.carried.costs.get(size)) if drafting else ((1,), None)
        seconds = np.ones(len(widths), np.float32) if cost is None else cost.speculative.at(widths)
        seconds, rows = jax.device_put((seconds, np.int32(size)))
        drafter = self._drafter_params if self._toggle is None else Gate(rows, self._drafter_params)
        return EngineParams(
            self._target_params, drafter if drafting or reads(self.engine) else None, self._free, seconds
        )

    def state(self) -> dict[str, Any]:
        """Copies of what the next call depends on besides the policy, as a tree of arrays: to be saved with it.

        Raises ValueError where the policy was released.
        """
        self._check_policy()
        c = self.carried
        self._take_policy()
        if c.kept is None:
            c.kept = self._programs.fresh(self.params(self.sizes[0]))
        return jax.tree.map(lambda x: x if isinstance(x, np.ndarray) else jnp.copy(x), self._saved(c.kept))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that an engine of the same settings saved; the policy is given by `update_params`.

        Raises ValueError where the policy was released, or for another engine's state, naming the first array that
        differs; nothing has changed then.
        """
        self._check_policy()
        if self._derive is not None:
            self._drafter_params = self._derive(self._target_params)
        fresh = jax.eval_shape(functools.partial(compact.fresh, self.engine), self.params(self.sizes[0]))
        state = checks.check_state(state, self._saved(fresh))
        self.calls, version = (int(x) for x in np.asarray(state["counts"]))
        self._prompts.restore(np.asarray(state["prompts"]))
        arrays = {name: state[name] for name in ("kept", "memory", "history", "toggle")}
        costs, measured = self.carried.costs, self.carried.measured
        self.carried = Carried(**arrays, costs=costs, measured=measured, version=version)
        self._changed = False

    def take_over(self, other: RolloutEngine) -> None:
        """Remember of prompts what another engine does, their outputs and lengths: one of other sizes or ends, say.

        Raises ValueError for an engine that remembers other numbers of prompts or of tokens.
        """
        given = lambda e: {"prompts": e._prompts.saved(), "memory": e.carried.memory, "history": e.carried.history}  # noqa: E731
        found = checks.check_state(given(other), given(self))
        self._prompts.restore(np.asarray(found["prompts"]))
        self.carried.memory, self.carried.history = found["memory"], found["history"]
        self.carried.version = other.carried.version

    def _saved(self, kept: Any) -> dict[str, Any]:
        """What `state` copies, with these arrays (or shapes) as what rows share."""
        c, counts = self.carried, np.array([self.calls, self.carried.version], np.int32)
        carried = {"kept": kept, "memory": c.memory, "history": c.history, "toggle": c.toggle}
        return {"counts": counts, "prompts": self._prompts.saved(), **carried}

    def _run(
        self,
        carried: Carried,
        requests: Sequence[Requests],
        keys: UInt32[np.ndarray, "n 2"],
        places: Int[np.ndarray, "g"],
        order: Sequence[int],
        budget: int,
    ) -> Run:
        """A call on this engine's programs and settings."""
        return Run(
            self.engine,
            self._programs,
            self.params,
            carried,
            self.sizes,
            self._prefill_rows,
            self._toggle,
            requests,
            keys,
            places,
            order,
            budget,
            self._pad,
            self._column,
        )

    def _check_policy(self) -> None:
        """ValueError where there is no policy, or it does not run; one of the last one's shapes does."""
        if self._target_params is None:
            raise ValueError("target_params: got none since release_params, takes update_params before a call")
        found = checks.shapes(self._target_params)
        if found != self._known:
            checks.check_params(self.engine, self._target_params)
            self._known = found

    def _take_policy(self) -> None:
        """What a new policy asks for; not before a call needs it, since an update must not touch arrays."""
        if not self._changed:
            return
        if self._derive is not None:
            self._drafter_params = self._derive(self._target_params)
        self._changed = False
        c, age = self.carried, self._sync.max_age
        if c.memory is not None and age is not None:
            c.memory = _drop_older(c.memory, np.int32(c.version - age))
        if c.kept is not None and self._sync.calibration < 1:
            left = jnp.float32(self._sync.calibration)
            c.kept = self._programs.faded(self.params(self.sizes[0]), bound(c.kept, self._target_params), left)

    def _places(self, prompts: Sequence[Sequence[int]]) -> Int[np.ndarray, "g"]:
        """Where each prompt is remembered; what was remembered there of another one is cleared."""
        places, taken = self._prompts.places(prompts)
        if taken:
            at, c = np.full(self._prompts.size, -1, np.int32), self.carried
            at[: len(taken)] = taken
            c.history = _clear(c.history, at)
            c.memory = None if c.memory is None else self._programs.clear(c.memory, at)
        return places

    def _ordered(self, prompts: Sequence[Sequence[int]] | None, places: Int[np.ndarray, "g"]) -> list[int]:
        """The order in which prompts start; without prompts, what the built-in ones compile."""
        if self._order == "given":
            return list(range(len(places)))
        lengths = np.asarray(_expected(self.carried.history, places))
        if callable(self._order) and prompts is not None:
            lengths = checks.check_lengths(self._order(prompts, lengths), len(places))
        return np.argsort(-lengths, kind="stable").tolist()

    def _row_keys(self, key: Array | int | None, rows: Int[np.ndarray, "n"]) -> UInt32[np.ndarray, "n 2"]:
        """The keys of a call's rows, by their numbers in it; None is the engine's own next call."""
        words = self._key if key is None else noise.request_key(key)
        if words.shape != (2,):
            raise ValueError(f"key: got keys of shape {list(words.shape)}, takes one key")
        call, count, block = -1 if key is not None else self.calls, len(rows), self.sizes[-1]
        padded = np.resize(rows.astype(np.int32), -(-count // block) * block)
        own = [_keys(words, call, some) for some in padded.reshape(-1, block)]
        return np.concatenate(jax.device_get(own))[:count]


@jax.jit
def _keys(words: UInt32[Array, "2"], call: Array | int, rows: Int[Array, "n"]) -> UInt32[Array, "n 2"]:
    """The keys of some rows of a call; call -1 says that the key is the call's own."""
    whole = jax.random.wrap_key_data(words, impl="threefry2x32")
    next_one = jax.random.key_data(jax.random.fold_in(whole, jnp.maximum(call, 0)))
    whole = jax.random.wrap_key_data(jnp.where(jnp.asarray(call) < 0, words, next_one), impl="threefry2x32")
    own = jax.vmap(jax.random.fold_in, (None, 0))(whole, rows)
    return jax.random.key_data(own)


def _gated(engine: Engine) -> Engine:
    """The engine with a drafter that can be left out."""
    if engine.widths[0] != 1:
        raise ValueError(
            f"engine: got widths {engine.widths}, takes widths from 1 on with a toggle: a plain round is one"
        )
    gated = Gated(engine.drafter, reads=bool(getattr(engine.target, "taps", ())))
    return dataclasses.replace(engine, drafter=gated, controller=IfDrafted(engine.controller))
