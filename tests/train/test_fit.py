"""A run that was stopped and goes on has the curve of one that was not."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("grain", reason="reads the batches")
pytest.importorskip("tensorboardX", reason="writes the events")

from spec_jax.train import checkpoints, data, logs  # noqa: E402
from spec_jax.train.fit import fit  # noqa: E402
from spec_jax.train.schedule import BySteps  # noqa: E402
from spec_jax.train.step import adamw, init, make_step  # noqa: E402

VOCABULARY = 7
TOKENS = np.tile(np.arange(VOCABULARY, dtype=np.int32), 60)  # each token tells the next
SETTINGS = {"vocabulary": VOCABULARY, "seed": 0}


def loss(params, tokens):
    """A bigram table."""
    logits = params["table"][tokens[:, :-1]] + params["bias"]
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    return nats, {"loss": nats}


def fresh():
    params = {
        "table": 0.1 * jax.random.normal(jax.random.key(0), (VOCABULARY, VOCABULARY)),
        "bias": jnp.zeros(VOCABULARY),
    }
    return init(params, adamw(params))


def run(folder, total=30, stop_after=None, settings=SETTINGS, **options):
    """Train in a folder, from its newest checkpoint or from the start; (state, rows)."""
    with checkpoints.Checkpoints(folder / "checkpoints", settings) as kept:
        state = kept.restore(fresh()) or fresh()
        step = make_step(loss, adamw(state.params))

        def stopping(state, batch, rate):
            if stop_after is not None and int(state.step) + 1 == stop_after:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(state, batch, rate)

        batches = data.windows(TOKENS, 12, 4, 4, seed=1)
        with logs.Log(folder, int(state.step)) as log:
            state = fit(state, stopping, batches, BySteps(0.1, 3, total, 10), log, kept, **options)
    return state, logs.read(folder)


def test_a_resumed_run_has_the_same_curve(tmp_path):
    whole, rows = run(tmp_path / "whole")
    cut, _ = run(tmp_path / "cut", stop_after=13)
    assert int(cut.step) == 13
    resumed, again = run(tmp_path / "cut")
    assert int(whole.step) == int(resumed.step) == 30
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)
    assert [row["step"] for row in again] == list(range(1, 31))
    for name in ("loss", "rate", "gradient"):
        assert [row[name] for row in again] == [row[name] for row in rows]
    assert rows[-1]["loss"] < 0.5 < 1.5 < rows[0]["loss"]


def test_a_run_that_died_goes_on_from_its_newest_checkpoint(tmp_path):
    """Rows after the checkpoint are done again; the file has each step once."""

    class Died(Exception):
        pass

    def die(row):
        if row["step"] == 9:
            raise Died

    with pytest.raises(Died):
        run(tmp_path / "died", report=die, save_every=0.0)
    assert [row["step"] for row in logs.read(tmp_path / "died")] == list(range(1, 10))
    resumed, again = run(tmp_path / "died")
    whole, rows = run(tmp_path / "whole")
    assert [(row["step"], row["loss"]) for row in again] == [(row["step"], row["loss"]) for row in rows]
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)


def test_measures_come_with_their_step_and_once_at_the_end(tmp_path):
    seen = []

    def measure(params):
        seen.append(np.asarray(params["bias"]).copy())
        return {"held_out": float(len(seen))}

    _, rows = run(tmp_path, measure=measure, measure_every=10, log_every=4)
    assert [(row["step"], row["held_out"]) for row in rows if "held_out" in row] == [(10, 1), (20, 2), (30, 3)]
    assert [row["step"] for row in rows] == [4, 8, 10, 12, 16, 20, 24, 28, 30]


def test_another_run_is_refused(tmp_path):
    run(tmp_path)
    with pytest.raises(ValueError, match="seed: got 1, takes 0 to go on"):
        run(tmp_path, settings=SETTINGS | {"seed": 1})
    with pytest.raises(ValueError, match="extra: got 2, takes None"):
        run(tmp_path, settings=SETTINGS | {"extra": 2})


def test_only_matrices_decay():
    params = {"matrix": jnp.ones((2, 2)), "norm": jnp.ones(2)}
    optimizer = adamw(params, weight_decay=0.5)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    np.testing.assert_allclose(updates["matrix"], 0.5)
    np.testing.assert_array_equal(updates["norm"], 0)


def test_large_gradients_are_clipped():
    params = {"w": jnp.zeros(3)}
    optimizer = adamw(params, clip=1.0)

    def moments(gradient):
        _, state = optimizer.update({"w": jnp.asarray(gradient)}, optimizer.init(params), params)
        return state[1].mu["w"]

    np.testing.assert_allclose(moments([30.0, 0, 40.0]), moments([0.6, 0, 0.8]), rtol=1e-6)
