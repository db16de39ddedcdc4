"""Published rollout systems: each runs as its config says, and the text is plain rollouts'."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import configs
from spec_jax.control.cost import CostModel
from spec_jax.drafters.ngram import NGram
from spec_jax.engine.state import Finish
from spec_jax.rollout.schedule import LengthHead
from spec_jax.rollout.sieve import sieve
from spec_jax.rollout.toggle import RoundCost
from spec_jax.sampling.settings import Sampling
from tests.rollout import kit

PROMPTS, GROUP, BUDGET, MAX_LEN = [[1, 2, 3, 1, 2, 3, 1, 2], [4, 4], [7], [9, 2, 3, 1, 2]], 2, 16, 32
TARGET, POLICY = kit.small_llama()
CHEAP = RoundCost(1.0, CostModel((1, 16), (1.0, 1.01)))
SAMPLINGS = (Sampling(), Sampling(temperature=1.0))
HEAD = LengthHead(jnp.array([0.1]), jnp.array(0.0))  # the greater the first token, the longer


def features(prompts):
    return jnp.array([[p[0]] for p in prompts], jnp.float32)


SYSTEMS = {
    "efficient_rollout": {"costs": {4: CHEAP}},
    "war": {"costs": {4: CHEAP}},
    "nemo_rl": {"drafter": NGram(k=3)},
    "outlets": {"drafter": NGram(k=3), "length": HEAD, "features": features, "sizes": (1,)},
}

TOGGLED = {"efficient_rollout", "war"}  # test_gated and test_engine run such drafters and toggles on a smaller policy


def rollouts(name, **given):
    return configs.rollout(name, TARGET, MAX_LEN, POLICY, **{"sizes": (4,), "eos": (0, 5), "prompts": 4, **given})


@pytest.fixture(scope="module")
def plain():
    return rollouts("plain")


def same(one, other):
    np.testing.assert_array_equal(np.where(one.mask, one.tokens, -1), np.where(other.mask, other.tokens, -1))
    np.testing.assert_array_equal(one.finish, other.finish)
    np.testing.assert_allclose(one.log_probs, other.log_probs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in TOGGLED else n for n in SYSTEMS])
def test_text_is_plain_rollouts(name, plain, monkeypatch):
    build = configs.build

    def narrow(*args, **parts):
        engine = build(*args, **parts)
        return dataclasses.replace(engine, widths=(1, engine.widths[-1]) if len(engine.widths) > 1 else ())

    monkeypatch.setattr(configs, "build", narrow)
    engine = rollouts(name, **SYSTEMS[name])
    for sampling in SAMPLINGS:
        want = plain.generate(PROMPTS, BUDGET, group=GROUP, key=1, sampling=sampling)
        for _ in range(2):  # with what the first one left
            got = engine.generate(PROMPTS, BUDGET, group=GROUP, key=1, sampling=sampling)
            same(want, got)
        assert any(s.drafting for s in got.segments)
        if sampling.temperature == 0 or name in TOGGLED:
            assert got.acceptance_length > 1.1
    if name == "outlets":  # one row at a time: what each segment gave says which
        given = [s.tokens for s in got.segments]
        rows = [i * GROUP + j for i in (3, 2, 1, 0) for j in range(GROUP)]
        assert given == got.length[rows].tolist() != got.length.tolist()


def test_the_tail_runs_apart(plain):
    """TailSieve: what a partial rollout leaves is rolled out by two pools, under its own keys."""
    tail = rollouts("tailsieve", drafter=NGram(k=3), sizes=(2,))
    want = plain.generate(PROMPTS, BUDGET, group=GROUP, key=2)
    part = plain.generate(PROMPTS, BUDGET, group=GROUP, key=2, until_running=3)
    assert len({row // GROUP for row in np.flatnonzero(part.finish == Finish.RUNNING)}) >= 2
    asked = {"key": 2, "group": GROUP, "step": lambda rows: 1 + 0.2 * rows, "speedup": 2.0}
    got = sieve(plain, tail, PROMPTS, BUDGET, until_running=3, **asked)
    same(want, got)
    sizes, begun = [s.size for s in got.segments], len(part.segments)
    assert set(sizes[:begun]) == {4} and set(sizes[begun:]) == {2, 4}


def test_what_a_system_needs_is_named():
    with pytest.raises(ValueError, match="length: outlets needs one"):
        rollouts("outlets", drafter=NGram())
    with pytest.raises(ValueError, match="drafter: nemo_rl needs one"):
        rollouts("nemo_rl")
    with pytest.raises(ValueError, match="drafter: war uses none"):
        rollouts("war", drafter=NGram())
