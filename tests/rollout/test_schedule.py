"""Scheduling policies against plain Python."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.control.cost import CostModel
from spec_jax.rollout import schedule
from spec_jax.rollout.prompts import Prompts
from spec_jax.rollout.switch import pace
from spec_jax.rollout.toggle import RoundCost, Toggle


def test_history_is_a_running_mean_of_groups():
    h = schedule.observe(schedule.empty(4), jnp.array([2, 2, 0, -1, 9]), jnp.array([10, 20, 4, 99, 99]), 0.5)
    h = schedule.observe(h, jnp.array([2]), jnp.array([35]), 0.5)
    assert h.length.tolist() == [4, 0, 25, 0] and h.count.tolist() == [1, 0, 3, 0]
    # Prompts never seen, or without a place, have the mean of those that were.
    assert schedule.expected(h, jnp.array([2, 1, 0, -1])).tolist() == [25, 14.5, 4, 14.5]
    assert schedule.clear(h, jnp.array([2, -1])).count.tolist() == [1, 0, 0, 0]


def test_longest_first_and_the_tail():
    work = jnp.array([3.0, 9.0, 3.0, 7.0])
    assert schedule.longest_first(work).tolist() == [1, 3, 0, 2]
    assert schedule.tail(work, 2).tolist() == [False, True, False, True]
    assert schedule.tail(work, 0).tolist() == [False] * 4
    assert schedule.unfinished(jnp.array([0, 0, 1, 0, 0, 0], bool), 2).tolist() == [False, True, False]


def time_of(lengths, group, replicas, step):
    """A pool's time, step by step."""
    total = 0.0
    for t in range(int(max(lengths, default=0))):
        live = sum(n > t for n in lengths) * group
        total += step(max(live / replicas, 1.0))
    return total


@pytest.mark.parametrize("speedup", [1.0, 2.0])
def test_the_split_is_the_best_of_all(speedup):
    lengths, group, replicas = [40, 3, 5, 4, 38, 6], 4, 3
    step = lambda rows: 1.0 + 0.2 * rows  # noqa: E731
    order = sorted(lengths, reverse=True)
    times = {(0, 0): time_of(order, group, replicas, step)}
    for k, r in itertools.product(range(1, 6), range(1, 3)):
        first = time_of(order[:k], group, r, step) / speedup
        times[k, r] = max(first, time_of(order[k:], group, replicas - r, step))
    got = schedule.split(jnp.array(lengths, jnp.float32), group, replicas, step, speedup)
    assert (got.groups, got.replicas) == min(times, key=times.get)
    assert (got.groups > 0) == (speedup > 1)
    assert got.time == pytest.approx(times[got.groups, got.replicas], rel=1e-5)
    with pytest.raises(ValueError, match="replicas"):
        schedule.split(jnp.ones(2), 1, 0, step)


def test_a_length_head_finds_what_made_the_lengths():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(200, 3))
    length = np.exp(features @ [0.5, 0.0, -0.7] + 3)
    head = schedule.fit_length_head(jnp.asarray(features), jnp.asarray(np.round(length), jnp.int32), 1e-3)
    np.testing.assert_allclose(head.weight, [0.5, 0, -0.7], atol=0.02)
    np.testing.assert_allclose(head(jnp.asarray(features)), length, rtol=0.1)


COST = RoundCost(1.0, CostModel((1, 8), (1.1, 2.0)))


def test_a_rounds_cost_in_plain_rounds():
    """By the table, which follows the clock: two rounds in a row weigh as much as what was known."""
    assert COST.ratio(8) == pytest.approx(2.0) and COST.ratio(1) == pytest.approx(1.1) and COST.risk == 1.0
    drafted = COST.drafted(2, 8.0, 8)
    assert drafted.ratio(8) == pytest.approx(2**1.5) and drafted.ratio(1) == pytest.approx(1.1 * 2**0.5)
    assert COST.drafted(2, 9999.0, 8).ratio(8) == pytest.approx(2 * 8**0.5)
    assert COST.seen(2, 0.5).plain == 0.5 and COST.seen(1, 99.0).plain == 1.05
    assert RoundCost(3.0, COST.speculative).risk == 0.0


def played(toggle, ratio, tokens, risk, rounds):
    """Choices of a toggle until so many rounds have run, and what they took against plain ones' time."""
    s, choices, time, given = toggle.init(2), [], 0.0, 0.0
    while sum(n for _, n in choices) < rounds:
        on, n = toggle.decide(s, 1, risk)
        choices.append((bool(on), int(n)))
        brought = tokens(len(choices)) if on else 1.0
        s = toggle.observe(s, 1, on, n, brought, ratio if on else 1.0)
        time, given = time + n * (ratio if on else 1.0), given + n * brought
    assert s.gain[0] == 0 == s.saved[0]
    return choices, time / given


def test_a_trial_costs_what_was_put_aside():
    t = Toggle(probe=4, every=100, loss=0.02)
    for risk, first in ((1.0, 50), (3.0, 150), (9.0, 450), (0.5, 25), (0.1, 5)):
        choices, slower = played(t, 1 + risk, lambda _: 1.0, risk, 5000)
        at = choices.index((True, 1))
        assert sum(n for _, n in choices[:at]) == first and slower <= 1.02
        assert max(n for on, n in choices if on) <= min(4, max(1, 4 / risk)) and all(n <= 100 for _, n in choices)
        assert all(not now[0] or not before[0] for before, now in itertools.pairwise(choices))
    assert played(t, 1.0, lambda _: 1.0, 0.0, 8)[0][0] == (True, 4)


def test_nothing_is_tried_that_cannot_pay():
    """Not even where all nodes are accepted: eight tokens in the time of four plain rounds could, of nine could not."""
    for seconds, most in ((4.0, 2.0), (9.0, 8 / 9)):
        cost = RoundCost(1.0, CostModel((1, 2, 8), (1.1, 2.5, seconds)))
        assert cost.most == pytest.approx(max(most, 1 / 1.1))
        t = Toggle(every=16, loss=0.5)
        s = t.observe(t.init(1), 0, False, 400, 1.0, 1.0)
        on, n = t.decide(s, 0, cost.risk, cost.most)
        assert (bool(on), int(n)) == ((True, 1) if most > 1 else (False, 16))


def test_what_it_costs_to_begin_a_trial_is_made_up_for_and_does_not_count_against_drafts():
    t = Toggle(every=16, loss=0.02)
    s = t.observe(t.init(1), 0, True, 2, 1.0, 1.25, 4.0)
    assert float(s.gain[0]) == pytest.approx(0.8) and float(s.saved[0]) == pytest.approx(-6) and int(s.wait[0]) == 300
    s = t.observe(t.init(1), 0, True, 2, 2.0, 1.25, 4.0)
    assert float(s.gain[0]) == pytest.approx(1.6) and int(s.wait[0]) == 0


def test_it_goes_on_while_it_pays_and_is_given_up_when_it_does_not():
    t = Toggle(probe=4, every=16, decay=0.0, loss=0.5)
    choices, _ = played(t, 1.5, lambda i: 2.0 if i < 6 else 1.2, 0.5, 70)
    assert choices[:7] == [(False, 1), (True, 1), (True, 8), (True, 16), (True, 16), (True, 16), (False, 16)]


def test_the_more_trials_fail_in_a_row_the_rarer_they_are():
    """Ten plain rounds behind the first, twice as many behind each further one, 40 at most; anew where one paid."""
    t = Toggle(probe=1, every=10, decay=0.0, loss=1.0, patience=4)
    trials = itertools.count(1)
    gains = {5: 4.0}  # the fifth trial pays, what follows it does not
    choices = played(t, 2.0, lambda _: gains.get(next(trials), 1.0), 1.0, 200)[0]
    at = [i for i, (on, _) in enumerate(choices) if on]
    waits = [sum(n for _, n in choices[a + 1 : b]) for a, b in itertools.pairwise(at)]
    assert waits[:7] == [10, 20, 40, 40, 0, 10, 20]


@pytest.mark.parametrize(
    "options", [{"margin": 0}, {"probe": 0}, {"every": 0}, {"decay": 1.0}, {"loss": 0}, {"patience": 0}]
)
def test_bad_toggles_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Toggle(**options)
    with pytest.raises(ValueError, match="plain"):
        RoundCost(0.0, COST.speculative)


@pytest.mark.parametrize(
    ("ended", "waiting", "found"),
    [((0, 0, 0), False, 2.0), ((1, 1, 0), False, 0.5), ((1, 1, 0), True, 2.0), ((1, 1, 1), False, 3.5)],
    ids=["all run", "one is left", "others wait", "none is left"],
)
def test_a_pace_is_that_of_the_rows_that_a_call_waits_for(ended, waiting, found):
    """Four rounds gave 14, 8 and 2 tokens: of 24 the mean is 2 by round, of the slowest row 0.5, of the longest 3.5."""
    tokens = np.array([14, 8, 2])
    assert pace(tokens, np.array(ended, bool), 4, waiting) == found
    assert pace(tokens * 0, np.array(ended, bool), 0, waiting) == 0


def test_prompts_keep_their_place_until_others_need_it():
    table = Prompts(3)
    assert table.places([[1], [2], [1]])[0].tolist() == [0, 1, 0] and len(table) == 2
    places, taken = table.places([[3], [4]])
    assert places.tolist() == [2, 0] and taken == [0]
    # [1] has lost its place and takes that of [2], which takes that of [3].
    assert table.places([[1]]) and table.places([[2]])[1] == [2]
    places, taken = table.places([[5], [6], [7], [8]])
    assert sorted(places.tolist()) == [-1, 0, 1, 2] and sorted(taken) == [0, 1, 2]
    other = Prompts(3)
    other.restore(table.saved())
    assert other.places([[7], [5], [9]])[0].tolist() == table.places([[7], [5], [9]])[0].tolist()
    with pytest.raises(ValueError, match="table"):
        Prompts(2).restore(table.saved())
