"""Tunix's own GRPO learner on our rollouts: a class or a partial, ratios of one, and the law of its vanilla rollout.

The policies are a Qwen 3, and a Llama with a tied embedding and another rotary base than Tunix's own.
"""

import dataclasses
import functools
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.filterwarnings("default")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("tunix", reason="needs google-tunix (the extra rl)")
    from tunix.rl import rl_cluster
    from tunix.rl.grpo import grpo_learner

    from scripts.grpo import tunix_side
    from scripts.grpo.tunix_model import Tokens, model_of
    from spec_jax.rollout.tunix import SpecRollout

from scripts.grpo import tasks  # noqa: E402
from scripts.grpo.policy import END, Policy  # noqa: E402
from spec_jax.drafters.siblings import Siblings  # noqa: E402
from spec_jax.engine.engine import Engine  # noqa: E402
from spec_jax.models.config import LlamaConfig, RopeConfig  # noqa: E402
from spec_jax.models.llama import Llama  # noqa: E402
from spec_jax.models.load import abstract_params  # noqa: E402
from spec_jax.models.qwen import Qwen  # noqa: E402
from spec_jax.models.qwen_config import ATTENTION, QwenConfig  # noqa: E402
from spec_jax.models.qwen_text import init_params  # noqa: E402

SIZES = dict(vocab_size=END + 2, hidden_size=16, intermediate_size=24, head_dim=8, num_heads=2, num_kv_heads=1)
QWEN = QwenConfig(layer_types=(ATTENTION,) * 2, sparse=(False,) * 2, rope=RopeConfig(theta=1e6), **SIZES)
LLAMA = LlamaConfig(num_layers=2, rope=RopeConfig(theta=1e3), tie_word_embeddings=True, **SIZES)
TASK = tasks.Task(tasks.worked_sums(4, 0).prompts, lambda _, text: sum(c in "13579" for c in text) / 10)
STEPS = 4


@functools.cache
def policy(family):
    if family == "qwen3":
        return Policy(Qwen(QWEN), init_params(QWEN, jax.random.key(0), scale=None), (END,), END + 1)
    rng = np.random.default_rng(0)
    draw = lambda x: jnp.asarray(rng.normal(x.ndim == 1, 0.2, x.shape), x.dtype)  # noqa: E731
    return Policy(Llama(LLAMA), jax.tree.map(draw, abstract_params(LLAMA)), (END,), END + 1)


def made(family="qwen3"):
    own = policy(family)
    return functools.partial(model_of, own.target, own.params), Tokens(own)


def small(target, max_len):
    return Engine(target, max_len, drafter=Siblings(nodes=4, longest=4, memory=64), widths=(1, 4), prefill_chunk=8)


PARTIAL = functools.partial(SpecRollout, build=small, sizes=(2, 8), key=5)


@pytest.mark.parametrize(
    ("family", "engine", "iterations"),
    [("qwen3", SpecRollout, 1), ("qwen3", PARTIAL, 2), ("llama3", PARTIAL, 1)],
    ids=["class", "partial", "llama3"],
)
def test_the_learner_trains_on_policy(family, engine, iterations):
    """Two updates of a step's batch (the partial) ask for `get_per_token_logps` as well."""
    found = tunix_side.train(engine, *made(family), TASK, 2, 4, 10, STEPS, 1e-2, iterations)
    assert len(found["reward"]) == len(found["tokens"]) == STEPS
    assert max(found["off_policy"]) < 1e-5 and min(found["tokens"]) > 0


def test_the_names_of_tunixs_main_branch(monkeypatch):
    """There an RLCluster is an RLEngine, and the learner's argument is named after it."""

    class Renamed(grpo_learner.GRPOLearner):
        def __init__(self, rl_engine, algo_config, reward_fns):
            super().__init__(rl_cluster=rl_engine, algo_config=algo_config, reward_fns=reward_fns)

    monkeypatch.setattr(rl_cluster, "RLEngine", rl_cluster.RLCluster, raising=False)
    monkeypatch.delattr(rl_cluster, "RLCluster")
    monkeypatch.setattr(grpo_learner, "GRPOLearner", Renamed)
    found = tunix_side.train(SpecRollout, *made(), TASK, 2, 4, 10, 1, 1e-2)
    assert len(found["reward"]) == 1 and max(found["off_policy"]) < 1e-5


def test_rollouts_of_an_older_policy_are_caught():
    """A rollout that keeps its first parameters is on policy in the first step alone."""

    class Stale(SpecRollout):
        def _params(self):
            self.first = getattr(self, "first", None) or jax.tree.map(jax.numpy.copy, super()._params())
            return self.first

    engine = functools.partial(Stale, build=small, toggle=None)
    first, *later = tunix_side.train(engine, *made(), TASK, 2, 4, 10, STEPS, 1e-2)["off_policy"]
    assert first < 1e-5 < 1e-2 < max(later)


@pytest.mark.parametrize("family", ["qwen3", "llama3"])
def test_the_law_is_the_vanilla_rollouts(family):
    make, tokens = made(family)
    given = (make(), tokens, TASK, TASK.prompts[:2], 100, 8, functools.partial(SpecRollout, key=1))
    found = tunix_side.law(*given, draws=1000)
    assert found["equal"], found
    assert not tunix_side.law(*given, temperature=0.6, draws=1000)["equal"]


def test_a_pad_is_no_token_of_a_prompt():
    """SmolLM2 pads with what ends a turn; then Tunix gets a special token without a use."""
    added = {i: SimpleNamespace(special=i != 5) for i in (1, END, 3, 5)}
    stub = SimpleNamespace(
        backend=SimpleNamespace(get_added_tokens_decoder=lambda: added), encode=lambda _: [1, 2], decode=str
    )
    ends = dataclasses.replace(policy("llama3"), pad=END, tokenizer=stub)
    assert made("qwen3")[1].pad_id() == END + 1
    assert Tokens(ends).pad_id() == 3 and Tokens(ends).ends() == [END]
    del added[3]
    with pytest.raises(ValueError, match="pad"):
        Tokens(ends)
