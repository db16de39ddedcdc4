"""Tunix's own GRPO learner on our rollouts: a class or a partial, ratios of one, and the law of its vanilla rollout."""

import functools
import warnings

import jax
import pytest

pytestmark = pytest.mark.filterwarnings("default")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("tunix", reason="needs google-tunix (the extra rl)")
    from scripts.grpo import tunix_side
    from scripts.grpo.tunix_model import model_of
    from spec_jax.rollout.tunix import SpecRollout

from scripts.grpo import tasks  # noqa: E402
from scripts.grpo.policy import END  # noqa: E402
from spec_jax.drafters.siblings import Siblings  # noqa: E402
from spec_jax.engine.engine import Engine  # noqa: E402
from spec_jax.models.config import RopeConfig  # noqa: E402
from spec_jax.models.qwen_config import ATTENTION, QwenConfig  # noqa: E402
from spec_jax.models.qwen_text import init_params  # noqa: E402

SIZES = dict(vocab_size=END + 2, hidden_size=16, intermediate_size=24, head_dim=8, num_heads=2, num_kv_heads=1)
CONFIG = QwenConfig(layer_types=(ATTENTION,) * 2, sparse=(False,) * 2, rope=RopeConfig(theta=1e6), **SIZES)
TASK = tasks.Task(tasks.worked_sums(4, 0).prompts, lambda _, text: sum(c in "13579" for c in text) / 10)
STEPS = 4


@pytest.fixture(scope="module")
def make():
    return functools.partial(model_of, CONFIG, init_params(CONFIG, jax.random.key(0), scale=None))


def small(target, max_len):
    return Engine(target, max_len, drafter=Siblings(nodes=4, longest=4, memory=64), widths=(1, 4), prefill_chunk=8)


@pytest.mark.parametrize(
    ("engine", "iterations"),
    [(SpecRollout, 1), (functools.partial(SpecRollout, build=small, sizes=(2, 8), key=5), 2)],
    ids=["class", "partial"],
)
def test_the_learner_trains_on_policy(make, engine, iterations):
    """Two updates of a step's batch (the partial) ask for `get_per_token_logps` as well."""
    found = tunix_side.train(engine, make, TASK, 2, 4, 10, STEPS, 1e-2, iterations)
    assert len(found["reward"]) == len(found["tokens"]) == STEPS
    assert max(found["off_policy"]) < 1e-5 and min(found["tokens"]) > 0


def test_rollouts_of_an_older_policy_are_caught(make):
    """A rollout that keeps its first parameters is on policy in the first step alone."""

    class Stale(SpecRollout):
        def _params(self):
            self.first = getattr(self, "first", None) or jax.tree.map(jax.numpy.copy, super()._params())
            return self.first

    engine = functools.partial(Stale, build=small, toggle=None)
    first, *later = tunix_side.train(engine, make, TASK, 2, 4, 10, STEPS, 1e-2)["off_policy"]
    assert first < 1e-5 < 1e-2 < max(later)


def test_the_law_is_the_vanilla_rollouts(make):
    actor = make()
    found = tunix_side.law(actor, TASK, TASK.prompts[:2], 100, 8, draws=1000)
    assert found["equal"], found
    assert not tunix_side.law(actor, TASK, TASK.prompts[:2], 100, 8, temperature=0.6, draws=1000)["equal"]
