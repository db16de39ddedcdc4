"""A drafter that is trained on what its policy rolls out: texts as plain, drafts accepted again once a policy moved."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("grain", reason="texts are those of training")

from spec_jax.drafters.eagle.config import EagleConfig  # noqa: E402
from spec_jax.engine.engine import Engine  # noqa: E402
from spec_jax.rollout.engine import RolloutEngine  # noqa: E402
from spec_jax.rollout.refresh import Refresh, texts_of  # noqa: E402
from spec_jax.rollout.toggle import Toggle  # noqa: E402
from spec_jax.sampling.settings import Sampling  # noqa: E402
from spec_jax.topology.growth import Growth  # noqa: E402
from spec_jax.train import features, heads  # noqa: E402
from spec_jax.train.objective import Objective  # noqa: E402
from spec_jax.train.task import Task  # noqa: E402
from tests.drafters.hybrid import hybrid  # noqa: E402
from tests.rollout import kit  # noqa: E402

PROMPTS, GROUP, MOST, K = [[3, 1], [5, 9, 2], [7, 7], [2, 11, 13]], 4, 16, 2
ROWS = GROUP * len(PROMPTS)
COLD = Sampling(temperature=0.3)
SHAPE = Growth(nodes=K + 1, depth=K, width=1, children=1, candidates=4)
KL = Objective((("forward_kl", 1.0),))


def eagle():
    target, _ = kit.small_llama()
    sizes = {name: getattr(target.config, name) for name in ("vocab_size", "hidden_size", "num_heads", "head_dim")}
    forward = heads.EagleForward(EagleConfig(**sizes, intermediate_size=24, num_kv_heads=1, taps=(0, 1)), K)
    return target, [kit.small_llama(seed=s)[1] for s in range(3)], forward


def mtp():
    models = [hybrid(sparse=False, seed=s) for s in range(3)]
    return models[0][0], [params for _, params in models], heads.MtpForward(models[0][0].config, K)


class Loop:
    """Rollouts whose drafter is what `make` makes of the policy, beside plain ones."""

    def __init__(self, target, policies, forward):
        tapped = forward.tapped(target)
        self.task = Task(forward, features.with_last(tapped, target.config.num_layers), KL, anchors=8, steps=1)
        begun = forward.init(jax.random.key(1), policies[0])
        self.policies, self.forward = policies, forward
        self.refresh = Refresh(self.task, begun, length=24, capacity=ROWS, rows=8, steps=40, rate=0.01)
        self.make = self.refresh.derive
        engine = Engine(tapped, 24, drafter=forward.drafter(SHAPE), widths=(1, K + 1), prefill_chunk=8)
        self.rollouts = RolloutEngine(
            engine, policies[0], derive=lambda p: self.make(p), sizes=(ROWS,), toggle=Toggle(), costs=self.costs(0.5)
        )
        self.plain = RolloutEngine(Engine(target, 24, prefill_chunk=8), policies[0], sizes=(ROWS,))

    @staticmethod
    def costs(drafted):
        return kit.costs((ROWS,), drafted=drafted, nodes=K + 1)

    def want(self, number):
        self.plain.update_params(self.policies[number])
        return self.plain.generate(PROMPTS, MOST, group=GROUP, sampling=COLD, key=number)

    def roll(self, number, make):
        self.make = make
        self.rollouts.update_params(self.policies[number])
        return self.rollouts.generate(PROMPTS, MOST, group=GROUP, sampling=COLD, key=number)


@pytest.fixture(scope="module", params=[eagle, pytest.param(mtp, marks=pytest.mark.slow)])
def loop(request):
    return Loop(*request.param())


def test_a_refreshed_head_follows_the_policy(loop):
    """Three unrelated policies: the head that learned the first one drafts them no more, the refreshed one does."""
    refresh, frozen, programs = loop.refresh, None, []
    for number in range(3):
        want = loop.want(number)
        stale = loop.roll(number, refresh.derive)
        refresh.tell(PROMPTS, stale)
        found = [stale, loop.roll(number, refresh.derive)]
        frozen = refresh.trained if number == 0 else frozen
        found.append(loop.roll(number, functools.partial(loop.forward.as_drafter, frozen)))
        for rollout in found:
            np.testing.assert_array_equal(rollout.tokens, want.tokens)
        before, after, kept = (r.acceptance_length for r in found)
        assert after > (before if number == 0 else max(before, kept)) + 0.4
        assert after == kept or number > 0
        programs.append((loop.rollouts.programs, refresh.programs))
    assert programs[0] == programs[2] and programs[0][1] == 2


@pytest.mark.slow
def test_plain_rounds_keep_the_head_informed(loop):
    """The toggle leaves drafts out and takes them up: texts are plain's, and drafts as good as if it never had."""
    want = loop.want(2)
    loop.refresh.tell(PROMPTS, want)
    assert loop.roll(2, loop.refresh.derive).acceptance_length > 1.4
    loop.rollouts.carried.costs = loop.costs(1.3)
    loop.rollouts._toggle = Toggle(probe=4, every=3, loss=0.05)
    loop.rollouts.carried.toggle = loop.rollouts._toggle.init(1)
    mixed = loop.roll(2, loop.refresh.derive)
    np.testing.assert_array_equal(mixed.tokens, want.tokens)
    assert {s.drafting for s in mixed.segments} == {True, False}
    first = next(s for s in mixed.segments if s.drafting)
    assert first.tokens / first.row_rounds > 1.4, "drafts behind the first plain rounds"


def test_it_learns_of_what_it_is_told_alone(loop):
    refresh, policy = loop.refresh, loop.policies[0]
    before, saved = refresh.trained, refresh.state()
    same = lambda a, b: jax.tree.map(np.testing.assert_array_equal, a, b)  # noqa: E731
    refresh.derive(policy)
    same(refresh.trained, before)
    rollout = loop.want(0)
    refresh.tell(PROMPTS, rollout)
    refresh.derive(policy)
    after = refresh.trained
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True))
    refresh.restore(saved)
    same(refresh.trained, before)
    refresh.tell(PROMPTS, rollout)
    refresh.derive(policy)
    same(refresh.trained, after)


def test_rows_without_weight_teach_nothing(loop):
    """Rewards of nothing: no gradient."""
    refresh = Refresh(loop.task, loop.refresh.trained, length=24, capacity=ROWS, rows=8)
    refresh._update, refresh._push = loop.refresh._update, loop.refresh._push
    before = refresh.trained
    refresh.tell(PROMPTS, loop.want(0), np.zeros(ROWS))
    refresh.derive(loop.policies[0])
    assert refresh.metrics is not None and float(refresh.metrics["gradient"]) == 0
    jax.tree.map(np.testing.assert_array_equal, refresh.trained, before)


def test_texts_are_prompts_and_what_was_emitted():
    tokens, mask = np.array([[5, 6, 7], [8, 9, 0]]), np.array([[1, 1, 1], [1, 0, 0]], bool)
    found = texts_of([[1, 2], [3]], tokens, mask, np.array([0.5, 2.0]), 4, 3)
    np.testing.assert_array_equal(found.tokens, [[2, 5, 6, 7], [3, 8, 0, 0], [0] * 4])
    np.testing.assert_array_equal(found.mask, [[0, 1, 1, 1], [0, 1, 0, 0], [0] * 4])
    np.testing.assert_array_equal(found.length, [4, 2, 0])
    np.testing.assert_array_equal(found.weight, [0.5, 2.0, 0.0])


def test_mistakes_are_named(loop):
    task, trained = loop.task, {"x": jnp.zeros(1)}
    for wrong in ({"length": 0}, {"capacity": 0}, {"rows": -1}, {"steps": 0}, {"rate": 0.0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: got"):
            Refresh(task, trained, **{"length": 8, **wrong})
    rollout = loop.want(0)
    for weights in ([1.0], [-1.0] * ROWS, [np.nan] * ROWS):
        with pytest.raises(ValueError, match="weights: got"):
            loop.refresh.tell(PROMPTS, rollout, weights)
    with pytest.raises(ValueError, match="prompts: got 3 for 16 rows"):
        loop.refresh.tell(PROMPTS[:3], rollout)
