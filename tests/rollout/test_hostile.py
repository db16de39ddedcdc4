"""What a rollout engine does not take is refused by name, and moves nothing."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.control.cost import CostModel
from spec_jax.rollout import schedule
from spec_jax.rollout.engine import RolloutEngine
from spec_jax.rollout.records import Sync
from spec_jax.rollout.toggle import RoundCost, Toggle
from tests.rollout import kit

SIZES, NAN = (2, 5), float("nan")
COST = RoundCost(1.0, CostModel((1,), (1.0,)))
STEP = lambda rows: rows  # noqa: E731


def call(function, *args, **named):
    """Without the checks of types and shapes that tests add."""
    return inspect.unwrap(function)(*args, **named)


def make(kind, *args, **named):
    made = object.__new__(kind)
    call(kind.__init__, made, *args, **named)
    return made


def refused(name):
    return pytest.raises(ValueError, match=rf"(?s)^{name}\b[^ ]*: got .*, takes ")


@pytest.fixture(scope="module")
def engine():
    return kit.drafting(SIZES, toggle=Toggle())


SETTINGS = [
    *(("eos", value) for value in ((1.7,), (True,), 3, None, "ab", (kit.WORDS,), (-1,), (0, 1, 2))),
    *(("pad_id", value) for value in ("x", None, 1.5, -1, 2**40, True)),
    *(("costs", value) for value in ({3: COST}, {2: 1.0}, [1])),
    *(("toggle", True), ("sync", {}), ("sync", 3), ("derive", 3), ("order", None), ("order", "x")),
    *(("prefill_rows", True), ("prompts", True), ("engine", None), ("engine", kit.TARGET), ("sizes", (True,))),
]


@pytest.mark.parametrize(("name", "value"), SETTINGS)
def test_settings(name, value):
    given = {"engine": kit.engine(kit.DRAFTER), "target_params": kit.policy(), "sizes": SIZES, name: value}
    with refused(name):
        make(RolloutEngine, **given)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        *((Toggle, "margin", value) for value in (float("inf"), NAN, "a", True)),
        *((Toggle, "probe", True), (Toggle, "every", 1.5), (Toggle, "decay", "x"), (Toggle, "loss", None)),
        *((Sync, "max_age", True), (Sync, "calibration", "x"), (Sync, "calibration", NAN), (Sync, "calibration", True)),
        *((RoundCost, "plain", "a"), (RoundCost, "plain", True), (RoundCost, "speculative", 3)),
    ],
)
def test_records(kind, name, value):
    given = {"plain": 1.0, "speculative": CostModel((1,), (1.0,))} if kind is RoundCost else {}
    with refused(name):
        make(kind, **{**given, name: value})


CALLS = [
    *(("prompts", value) for value in (None, [1, 2], "abc", ["abc"], [[1.5]], [[True]], [None], [[9]], [], {1: [2]})),
    *(("max_new_tokens", value) for value in (True, None, 4.0, "4", -3)),
    *(("group", True), ("group", 2.0), ("until_running", True), ("sampling", {}), ("sampling", 1.0)),
    *(("numbers", value) for value in ([0], [0, 0, 1, 2], [0, 1, 2, -1], [0, 1, 2, 2**31], [0.0, 1, 2, 3], "abcd")),
]


@pytest.mark.parametrize(("name", "value"), CALLS)
def test_calls(name, value, engine):
    before = engine.carried.kept, engine.carried.history, engine.calls, len(engine._prompts)
    with refused(name):
        call(RolloutEngine.generate, engine, **{"prompts": kit.PROMPTS, "max_new_tokens": 4, name: value})
    now = engine.carried.kept, engine.carried.history, engine.calls, len(engine._prompts)
    assert all(x is y for x, y in zip(before, now, strict=True))


@pytest.mark.parametrize("lengths", [[1.0], [1.0, 2.0, 3.0, NAN], None, "abcd"])
def test_orders(lengths, engine, monkeypatch):
    monkeypatch.setattr(engine, "_order", lambda prompts, seen: lengths)
    with refused("order"):
        engine.generate(kit.PROMPTS, 4)
    assert engine.calls == 0 and engine.carried.kept is None


def test_policies(engine):
    """One that the target does not run with, and none."""
    tokens, length = jnp.zeros((1, 4), jnp.int32), jnp.array([4])
    with refused("temperature"):
        engine.log_probs(tokens, length, NAN)
    try:
        for policy in (jnp.zeros((3, 3)), {"table": kit.policy()}, None):
            engine.update_params(policy, new=False)
            for f in (
                lambda: engine.generate(kit.PROMPTS, 4),
                lambda: engine.warm_up([1], 4),
                lambda: engine.log_probs(tokens, length),
                engine.state,
                lambda: engine.restore({}),
            ):
                with refused("target_params"):
                    f()
    finally:
        engine.update_params(kit.policy(), new=False)
    assert engine.calls == 0 and engine.carried.kept is None
    with refused("prompts"):
        engine.warm_up([1], 4, prompts=0)


def test_states(engine):
    """Another engine's: the first array that differs is named, and nothing has changed."""
    saved = jax.tree.map(np.asarray, engine.state())
    short = jax.tree.map(lambda x: x[:, :32] if x.ndim == 2 else x, saved["memory"])
    for state, what in (
        ({}, r"state\['counts'\]: got nothing, takes int32\[2\]"),
        (None, "state: got None, takes a Mapping"),
        ({**saved, "toggle": None}, r"state\['toggle'\].gain: got nothing, takes float32\[2\]"),
        ({**saved, "memory": short}, r"state\['memory'\].tokens: got int32\[3, 32\], takes int32\[3, 64\]"),
        ({**saved, "more": np.zeros(1)}, r"state\['more'\]: got float64\[1\], takes nothing"),
        ({**saved, "counts": np.zeros(2, np.int64)}, r"state\['counts'\]: got int64"),
    ):
        carried = engine.carried
        with pytest.raises(ValueError, match=what):
            call(RolloutEngine.restore, engine, state)
        assert engine.carried is carried
    engine.restore(saved)
    assert engine.carried is not carried
    jax.tree.map(np.testing.assert_array_equal, saved, jax.tree.map(np.asarray, engine.state()))


@pytest.mark.parametrize(
    ("name", "function", "args"),
    [
        *(("k", schedule.tail, (jnp.arange(4.0), k)) for k in (-1, 1.5, True)),
        *(("group", schedule.unfinished, (jnp.ones(6, bool), group)) for group in (4, 0, True)),
        *(("length", schedule.split, (jnp.array(x, jnp.float32), 2, 3, STEP)) for x in ([], [NAN, 1.0], [-1.0])),
        *(
            ("group", schedule.split, (jnp.ones(2), 0, 3, STEP)),
            ("replicas", schedule.split, (jnp.ones(2), 1, 0, STEP)),
        ),
        ("speedup", schedule.split, (jnp.ones(2), 1, 2, STEP, NAN)),
        *(("penalty", schedule.fit_length_head, (jnp.ones((4, 2)), jnp.ones(4, jnp.int32), x)) for x in (-1.0, NAN)),
        ("features", schedule.fit_length_head, (jnp.ones((0, 2)), jnp.ones(0, jnp.int32))),
        ("length", schedule.fit_length_head, (jnp.ones((4, 2)), jnp.ones(3, jnp.int32))),
        ("prompts", schedule.empty, (0,)),
    ],
)
def test_schedules(name, function, args):
    with refused(name):
        call(function, *args)
