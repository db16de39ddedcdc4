"""The example of a training loop that rolls out inside its own jit."""

from examples import rollout_in_jit as example


def test_the_example_learns_on_policy_and_faster_as_it_does(capsys):
    history = example.main(steps=40)
    first, last = history[0], history[-1]
    assert max(h["ratio"] for h in history) < 1e-5
    assert first["reward"] < 0.2 < 0.5 < last["reward"]
    assert last["tokens_per_pass"] > 1.3 * first["tokens_per_pass"] >= 1.3
    assert len(capsys.readouterr().out.splitlines()) == 5
    assert example.step._cache_size() == 1
