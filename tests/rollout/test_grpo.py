"""The GRPO script's parts: rewards that check, advantages, a ratio of one on policy; and a run that goes on."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.grpo import policy as policies
from scripts.grpo import tasks, trainer

ROOT = Path(__file__).parents[2]


def test_rewards_tell_right_from_wrong():
    sums = tasks.worked_sums(5, 0)
    assert [sums.reward(i, text) for i, text in enumerate(sums.solved)] == [1.0] * 5
    first = sums.solved[0].split(";")
    assert sums.reward(0, ";".join([*first[:2], "7."])) == 0.5 and sums.reward(0, "") == 0.0
    assert sums.reward(0, f"0+0=0;{first[2]}") == 0.5
    chat = tasks.chat_sums(2, 0)
    a, b = (int(w.strip(".")) for w in chat.prompts[1].split() if w.strip(".").isdigit())
    assert chat.reward(1, f"{a} and {b}: it is {a + b}.") == 1.0 and chat.reward(1, f"{a + b + 1}") == 0.0
    code = tasks.parsing(3, 0)
    assert code.reward(0, "return name\n") == 1.0 and code.reward(0, "return )\n    x\n") == 0.0
    assert 0 < code.reward(0, "x = name\n    y = (\n") < 1


def test_advantages_are_a_groups_own():
    got = trainer.advantages(np.array([1.0, 0.0, 3.0, 3.0]), 2)
    np.testing.assert_allclose(got, [1, -1, 0, 0], atol=1e-3)


def test_a_gradient_on_policy():
    """The ratio is one, so the gradient is that of the log-probs weighed by advantages; nothing else counts."""
    model = policies.load("toy", 0)
    tokens = np.random.default_rng(0).integers(0, 14, (2, 6))
    mask = np.arange(6) < np.array([[6], [3]])
    size, prompts = 12, [[1, 2, 3], [4]]
    batch = trainer.batch_of(prompts, tokens, mask, np.zeros((2, 6)), np.array([1.0, -2.0]), size)
    logs = jax.jit(lambda p, t: policies.log_probs(model.target, p, t, 0.5))
    batch = batch.replace(old=logs(model.params, batch.tokens))
    assert batch.mask.sum() == 9 and batch.tokens[0, :9].tolist() == [1, 2, 3, *tokens[0]]
    grad = jax.jit(jax.grad(trainer.loss(model.target, 0.5), has_aux=True))
    got, metrics = grad(model.params, batch)
    assert metrics["off_policy"] < 1e-5
    weight = jnp.where(batch.mask, batch.advantage[:, None], 0.0) / 9
    want = jax.jit(jax.grad(lambda p: -(policies.log_probs(model.target, p, batch.tokens, 0.5) * weight).sum()))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), got, want(model.params))


@pytest.mark.slow
def test_a_run_goes_on_where_it_was(tmp_path):
    """Three steps at once, and one and then two: the same rewards; both sides' tokens are the same."""

    def run(name, *arguments):
        command = [
            sys.executable,
            ROOT / "scripts" / "rollout_grpo.py",
            "--quick",
            "--run",
            tmp_path / name,
            *arguments,
        ]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True, cwd=ROOT)
        return json.loads(done.stdout.splitlines()[-1])

    whole = run("a", "--steps", "3")
    run("b", "--steps", "1")
    rest = run("b", "--steps", "3", "--resume")
    assert [r["reward"] for r in whole["steps"]] == [r["reward"] for r in rest["steps"]]
    assert [r["tokens"] for r in whole["steps"]] == [r["tokens"] for r in rest["steps"]]
    for result in (whole, rest):
        assert result["replay"]["different"] == 0 and max(r["off_policy"] for r in result["steps"]) < 1e-4
