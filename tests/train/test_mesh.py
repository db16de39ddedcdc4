"""Training on two devices gives what one gives."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import environment

RUN = """
import json, jax, numpy as np
from spec_jax.train import mesh as meshes
from spec_jax.train.loader import Feed, windows
from spec_jax.train.objective import Objective
from spec_jax.train.step import adamw, init, make_step
from spec_jax.train.task import Task
from tests.train import toy

devices = len(jax.devices())
mesh = meshes.data_mesh() if devices > 1 else None
forward = toy.Linear()
task = Task(forward, toy.target(), Objective((("forward_kl", 1.0),)), anchors=4, steps=10)
optimizer = adamw(forward.init())
state = meshes.replicate(init(forward.init(), optimizer), mesh)
feed = Feed(windows(toy.texts(), 16, 4, seed=0), toy.params(), mesh=mesh)
if devices > 1:
    shards = feed[0].texts.tokens.addressable_shards
    assert [s.data.shape for s in shards] == [(2, 16), (2, 16)]
step, losses = make_step(task.loss, optimizer), []
for i in range(6):
    state, metrics = step(state, feed[i], 0.02)
    losses.append(float(metrics["loss"]))
assert step._cache_size() == 1
print(json.dumps([devices, losses, float(np.abs(np.asarray(state.params["feature"])).sum())]))
"""


def run(devices):
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        capture_output=True,
        text=True,
        env=environment(devices),
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_two_devices_give_the_same_curve():
    pytest.importorskip("grain", reason="reads the batches")
    (one, losses, size), (two, spread, spread_size) = run(1), run(2)
    assert (one, two) == (1, 2)
    assert spread == pytest.approx(losses, rel=1e-5) and spread_size == pytest.approx(size, rel=1e-5)
    assert losses[-1] < losses[0]
