"""The GRPO script's parts: rewards that check, advantages, a ratio of one on policy; and a run that goes on."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.grpo import policy as policies
from scripts.grpo import tasks, trainer, two_samples

ROOT = Path(__file__).parents[2]


def test_rewards_tell_right_from_wrong():
    sums = tasks.worked_sums(5, 0)
    assert [sums.reward(i, text) for i, text in enumerate(sums.solved)] == [1.0] * 5
    first = sums.solved[0].split(";")
    assert sums.reward(0, ";".join([*first[:2], "7."])) == 0.5 and sums.reward(0, "") == 0.0
    assert sums.reward(0, f"0+0=0;{first[2]}") == 0.5
    chat = tasks.chat_sums(2, 0)
    a, b = map(int, re.findall(r"\d+", chat.prompts[1])[-2:])
    answers = (f"It is\n{a + b}", f"{a + b + 1}\n", f"{a + b + 10}", f"{a + b}, I think", "-1", "")
    np.testing.assert_allclose([chat.reward(1, x) for x in answers], [1.0, 0.47, 0.2, 0.0, 0.0, 0.0])
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


def test_two_samples_of_one_law_are_told_from_two_laws():
    """Another mean; and another law with the same means, which the texts alone tell."""
    rng = np.random.default_rng(0)
    same, again = (rng.choice(4, (3, 200), p=(0.1, 0.4, 0.4, 0.1)) for _ in range(2))
    tiled = lambda *values: np.tile(values, (3, 20))  # noqa: E731
    even, shifted, spread = tiled(*[0, 1, 2, 3] * 2, 1, 2), tiled(*[1, 2, 2, 3] * 2, 1, 2), tiled(*[0, 3] * 4, 1, 2)
    of = lambda x: {"value": x.astype(float)}  # noqa: E731
    texts = lambda x: [[(t,) for t in row] for row in x.tolist()]  # noqa: E731
    compare = lambda a, b: two_samples.compare(of(a), of(b), (texts(a), texts(b)), draws=999)  # noqa: E731
    one = compare(same, again)
    value = one["figures"]["value"]
    assert one["equal"] and abs(value["difference"]) < value["half_width"] < 0.15
    two, three = compare(even, shifted), compare(even, spread)
    assert not two["equal"] and two["figures"]["value"]["p_value"] == 0.001
    assert not three["equal"] and three["texts_p_value"] == 0.001 and three["figures"]["value"]["p_value"] == 1.0


@pytest.mark.slow
def test_a_run_goes_on_where_it_was(tmp_path):
    """Three steps at once, and one and then two that are timed twice: the same rewards, and both sides' tokens.

    All rounds draft, which a run's settings say: it does not go on without.
    """

    def run(name, *arguments, check=True):
        script = (sys.executable, ROOT / "scripts" / "rollout_grpo.py", "--quick", "--run", tmp_path / name)
        command = [str(x) for x in (*script, *arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=check, cwd=ROOT)

    def result(done):
        return json.loads(done.stdout.splitlines()[-1])

    whole = result(run("a", "--steps", "3", "--always"))
    run("b", "--steps", "1", "--always")
    other = run("b", "--steps", "3", "--resume", check=False)
    assert other.returncode and "always" in other.stderr
    rest = result(run("b", "--steps", "3", "--resume", "--always", "--repeats", "2"))
    assert all(r["drafting"] == 1.0 for r in whole["steps"]) and whole["toggle"] == []
    assert [r["reward"] for r in whole["steps"]] == [r["reward"] for r in rest["steps"]]
    assert [r["tokens"] for r in whole["steps"]] == [r["tokens"] for r in rest["steps"]]
    for found in (whole, rest):
        assert found["replay"]["different"] == 0 and max(r["off_policy"] for r in found["steps"]) < 1e-4
        assert found["reward_apart"] == 0
    alone = result(run("b", "--steps", "3", "--resume", "--always", "--no-compare"))
    assert alone["replay"] is None and alone["reward_apart"] == 0 and alone["whole_run"]["ratio"] > 0
