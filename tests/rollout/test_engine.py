"""Rollout engines: the text is the policy's and the key's, whatever drafts, shrinks or waits."""

import itertools

import jax
import numpy as np
import pytest

from spec_jax.audit.replay import replay
from spec_jax.drafters.combined import Combined
from spec_jax.drafters.ngram import NGram
from spec_jax.engine.state import Finish
from spec_jax.rollout.engine import RolloutEngine
from spec_jax.rollout.toggle import Toggle
from spec_jax.sampling.settings import Sampling
from tests.rollout import kit

SIZES = (2, 5)


@pytest.fixture(scope="module")
def plain():
    return kit.plain(key=5)


@pytest.fixture(scope="module")
def drafting():
    engine = kit.drafting(SIZES, key=5, toggle=Toggle(probe=2, every=4))
    engine.warm_up(kit.PROMPTS[0], kit.BUDGET)
    assert engine.calls == 0
    return engine


@pytest.fixture(scope="module", autouse=True)
def compiled(drafting):
    """How many programs the warm-up has compiled."""
    return drafting.programs


@pytest.fixture(scope="module")
def compiles():
    """What the process compiles from here on."""
    events = []
    note = lambda event, _, **__: events.append(event) if event.endswith("backend_compile_duration") else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(note)
    return events


def same(one, other):
    """Tokens under the mask, the mask, why rows ended, and log-probs."""
    np.testing.assert_array_equal(one.mask, other.mask)
    np.testing.assert_array_equal(np.where(one.mask, one.tokens, -1), np.where(other.mask, other.tokens, -1))
    np.testing.assert_array_equal(one.finish, other.finish)
    np.testing.assert_allclose(one.log_probs, other.log_probs, rtol=0, atol=1e-6)


def test_speculation_changes_nothing_but_the_passes(plain, drafting):
    """Twelve rows on five slots that shrink to two, of four prompts on three places, against one plain batch."""
    lengths = []
    for _ in range(3):
        one = plain.generate(kit.PROMPTS, kit.BUDGET, group=kit.GROUP)
        other = drafting.generate(kit.PROMPTS, kit.BUDGET, group=kit.GROUP)
        same(one, other)
        assert one.acceptance_length == 1.0
        lengths.append(other.acceptance_length)
        assert {s.size for s in other.segments} == set(SIZES) and {s.size for s in one.segments} == {12}
        assert sum(s.tokens for s in other.segments) == other.mask.sum()
        assert sum(s.row_rounds for s in other.segments) == other.rounds.sum()
    assert min(lengths) > 1.05
    assert plain.calls == drafting.calls == 3


def test_calls_leave_as_much_as_they_found(drafting, compiles):
    """D29's kind: in calls of more prompts than are remembered nothing compiles and no array is left on the device."""
    calls = [[[i % 7 + 1, j + 1] for j in range(4)] for i in range(20)]
    drafting.generate(calls[0], 6)
    programs, compiled = drafting.programs, len(compiles)
    alive = sum(x.nbytes for x in jax.live_arrays())
    for prompts in calls[1:]:
        drafting.generate(prompts, 6)
        assert sum(x.nbytes for x in jax.live_arrays()) <= alive
    assert (drafting.programs, len(compiles)) == (programs, compiled)


def test_what_is_remembered_is_taken_over_by_an_engine_of_other_sizes(drafting):
    other = kit.drafting((4,))
    other.take_over(drafting)
    for one, its in (
        (other.carried.memory, drafting.carried.memory),
        (other.carried.history, drafting.carried.history),
    ):
        jax.tree.map(np.testing.assert_array_equal, one, its)
    assert other._prompts.places([kit.PROMPTS[0]])[1] == drafting._prompts.places([kit.PROMPTS[0]])[1]
    with pytest.raises(ValueError, match=r"history.*: got .*\[3\].*, takes .*\[4\]|prompts"):
        kit.drafting((4,), prompts=4).take_over(drafting)


def test_rows_are_the_targets_own(plain):
    """Every token is the choice of the row's own key; samples, prompts and calls have different ones."""
    start = plain.calls
    rollout = plain.generate(kit.PROMPTS, 6, group=kit.GROUP)
    call = jax.random.fold_in(jax.random.key(5, impl="threefry2x32"), start)
    for row, (tokens, mask, finish) in enumerate(zip(rollout.tokens, rollout.mask, rollout.finish, strict=True)):
        emitted, key = tokens[mask].tolist(), jax.random.fold_in(call, row)
        checked = replay(kit.TARGET, kit.policy(), kit.PROMPTS[row // 3], emitted, key, Sampling(1.0), max_len=48)
        assert checked.different == 0 and mask[: len(emitted)].all()
        assert (emitted[-1] == 0) == (finish == Finish.EOS) and 0 not in emitted[:-1]
        assert finish == Finish.EOS or len(emitted) == 6
    assert {Finish.EOS, Finish.BUDGET} == set(rollout.finish.tolist())
    assert len({tuple(t[m]) for t, m in zip(rollout.tokens, rollout.mask, strict=True)}) > 8


def test_behind_the_text_stand_pads_and_zeros(drafting):
    rollout = drafting.generate(kit.PROMPTS, kit.BUDGET, group=kit.GROUP, key=11)
    assert (rollout.tokens[~rollout.mask] == kit.WORDS).all() and (rollout.log_probs[~rollout.mask] == 0).all()
    assert (rollout.tokens[rollout.mask] < kit.WORDS).all() and (rollout.log_probs[rollout.mask] < 0).all()


def test_a_calls_key_is_its_own(drafting):
    """A key that is given decides; the engine's own goes on where it was."""
    calls = drafting.calls
    one = drafting.generate(kit.PROMPTS, kit.BUDGET, group=kit.GROUP, key=11)
    same(one, drafting.generate(kit.PROMPTS, kit.BUDGET, group=kit.GROUP, key=jax.random.key(11, impl="threefry2x32")))
    assert drafting.calls == calls


@pytest.mark.slow
def test_drafters_within_another_remember(plain):
    """Under a toggle too: the same samples once more are drafted from what was remembered of them."""
    combined = Combined(NGram(5), kit.DRAFTER, kit.DRAFTER.nodes)
    options = {"toggle": Toggle(margin=0.01), "costs": kit.costs((12,), drafted=1.0)}  # which goes on drafting
    engine = RolloutEngine(kit.engine(combined), kit.policy(), sizes=(12,), eos=(0,), **options)
    want = plain.generate(kit.PROMPTS, kit.BUDGET, group=kit.GROUP, key=3)
    first, second = (engine.generate(kit.PROMPTS, kit.BUDGET, group=kit.GROUP, key=3) for _ in range(2))
    same(want, first)
    same(want, second)
    assert second.acceptance_length > 1.5 * first.acceptance_length


def test_a_new_policy(plain, drafting):
    """Drafts of the old policy's outputs cost passes at most; the new policy's text is as without them."""
    before = plain.generate(kit.PROMPTS, kit.BUDGET, group=kit.GROUP, key=3)
    for e in (plain, drafting):
        e.update_params(kit.policy(1))
    one = plain.generate(kit.PROMPTS, kit.BUDGET, group=kit.GROUP, key=3)
    same(one, drafting.generate(kit.PROMPTS, kit.BUDGET, group=kit.GROUP, key=3))
    assert (one.tokens != before.tokens).any()
    for e in (plain, drafting):
        e.update_params(kit.policy())
    same(before, drafting.generate(kit.PROMPTS, kit.BUDGET, group=kit.GROUP, key=3))


def test_a_partial_rollout_is_a_start_of_the_whole(plain, drafting):
    whole = plain.generate(kit.PROMPTS, kit.BUDGET, group=kit.GROUP, key=2)
    part = drafting.generate(kit.PROMPTS, kit.BUDGET, group=kit.GROUP, key=2, until_running=2)
    cut = part.finish == Finish.RUNNING
    assert 0 < cut.sum() <= 2
    for row in range(12):
        n = part.length[row]
        assert n < whole.length[row] if cut[row] else n == whole.length[row]
        np.testing.assert_array_equal(part.tokens[row, :n], whole.tokens[row, :n])


def test_going_on_from_a_saved_state(drafting):
    saved = jax.tree.map(np.asarray, drafting.state())
    want = [drafting.generate(kit.PROMPTS, kit.BUDGET, group=kit.GROUP) for _ in range(2)]
    drafting.restore(saved)
    got = [drafting.generate(kit.PROMPTS, kit.BUDGET, group=kit.GROUP) for _ in range(2)]
    for one, other in zip(want, got, strict=True):
        same(one, other)
        np.testing.assert_array_equal(one.rounds, other.rounds)


def test_nothing_compiles_behind_the_warm_up(drafting, compiled):
    """Bounded programs and memory, whatever comes: prompts of all lengths, groups, budgets, policies."""
    kit.policy(1)
    drafting.generate(kit.PROMPTS, kit.BUDGET)
    programs, alive = drafting.programs, sum(x.nbytes for x in jax.live_arrays())
    assert programs == compiled <= 4 + 6 * len(SIZES) + 1
    rng = np.random.default_rng(0)
    for i in range(4):
        prompts = [rng.integers(1, kit.WORDS, n).tolist() for n in rng.integers(1, 20, 5)]
        drafting.generate(prompts, int(rng.integers(1, 25)), group=1 + i % 3)
        drafting.update_params((kit.policy(), kit.policy(1))[i % 2])
    drafting.update_params(kit.policy())
    assert drafting.programs == programs
    assert sum(x.nbytes for x in jax.live_arrays()) <= alive


def test_a_first_call_of_known_size_compiles_nothing_at_all(compiles):
    """Neither a program nor what surrounds it: with every choice of the toggle, and with a new policy."""
    engine = kit.drafting(SIZES, key=5, toggle=Toggle(probe=2, every=4, loss=0.5))
    engine.warm_up(kit.PROMPTS[0], kit.BUDGET, prompts=len(kit.PROMPTS), group=kit.GROUP)
    begun = len(compiles)
    rollouts = []
    for i in range(2):
        rollouts.append(engine.generate(kit.PROMPTS, kit.BUDGET, group=kit.GROUP))
        engine.update_params(kit.policy(i))
    assert {s.drafting for r in rollouts for s in r.segments} == {False, True}
    assert len(compiles) == begun > 0


def test_a_policy_that_is_bound_to_a_device_compiles_no_more(compiled):
    """As a trainer's arrays are: neither in the first call behind the warm-up nor later, for a new policy."""
    policies = [jax.device_put(kit.policy(i), jax.devices()[0]) for i in range(2)]
    engine = kit.drafting(SIZES, key=5, toggle=Toggle(probe=2, every=4))
    engine.update_params(policies[0], new=False)
    engine.warm_up(kit.PROMPTS[0], kit.BUDGET)
    assert engine.programs == compiled
    for i in range(3):
        engine.generate(kit.PROMPTS, kit.BUDGET, group=kit.GROUP)
        engine.update_params(policies[i % 2])
    assert engine.programs == compiled


@pytest.mark.parametrize(("takes", "trials"), [(5.0, 1), (6.5, 0)])
def test_where_speculation_does_not_pay_it_is_off(takes, trials, drafting, monkeypatch):
    """A pass costs five plain ones: but for a trial of one round at each size the rollout decodes plainly.

    If it costs more than its six nodes can bring, nothing is tried.
    """
    toggle = Toggle(probe=2, every=100, loss=0.5)
    monkeypatch.setattr(drafting, "_toggle", toggle)
    monkeypatch.setattr(drafting.carried, "costs", kit.costs(SIZES, plain=1.1, drafted=1.1 * takes))
    monkeypatch.setattr(drafting.carried, "toggle", toggle.init(len(SIZES)))
    segments = [s for _ in range(2) for s in drafting.generate(kit.PROMPTS, kit.BUDGET, group=kit.GROUP).segments]
    for size in SIZES:
        own = [s for s in segments if s.size == size]
        assert not own[0].drafting and sum(s.rounds for s in own if s.drafting) == trials
        before = sum(s.rounds for s in itertools.takewhile(lambda s: not s.drafting, own))
        assert before == 8 if trials else before > 8
    plain = [s for s in segments if not s.drafting]
    assert sum(s.rounds for s in plain) > 10 and all(s.tokens == s.row_rounds for s in plain)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"sizes": ()}, "sizes"),
        ({"sizes": (4, 2)}, "sizes"),
        ({"order": "random"}, "order"),
        ({"prompts": 0}, "prompts"),
        ({"prefill_rows": 0}, "prefill_rows"),
        ({"convention": "untempered"}, "convention"),
        ({"derive": lambda p: p, "drafter_params": 3}, "drafter_params"),
        ({"toggle": Toggle()}, "engine"),
    ],
)
def test_bad_settings_are_named(options, name):
    with pytest.raises(ValueError, match=name):
        RolloutEngine(kit.engine(kit.DRAFTER, widths=(6,)), kit.policy(), **options)


def test_bad_calls_are_named(drafting):
    for change, name in (
        ({"group": 0}, "group"),
        ({"until_running": -1}, "until_running"),
        ({"prompts": []}, "prompts"),
        ({"prompts": [[9]]}, "prompt"),
        ({"max_new_tokens": 60}, "max_new_tokens"),
    ):
        with pytest.raises(ValueError, match=name):
            drafting.generate(**{"prompts": kit.PROMPTS, "max_new_tokens": 4, **change})
