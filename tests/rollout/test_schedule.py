"""Scheduling policies against plain Python."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.control.cost import CostModel
from spec_jax.rollout import schedule, toggle
from spec_jax.rollout.prompts import Prompts
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


def test_gain_is_tokens_over_time():
    assert toggle.gain(30, 10, 8, COST) == pytest.approx(1.5) and toggle.gain(10, 10, 1, COST) == pytest.approx(1 / 1.1)
    given = (jnp.array([1.5, 1.5]), jnp.ones(2), jnp.array([1.4, 1.6]))
    assert toggle.speculates(*given).tolist() == [True, False]
    assert toggle.speculates(*given, margin=1.1).tolist() == [False, False]


def test_a_toggle_tries_waits_and_tries_again():
    t = Toggle(margin=1.0, probe=4, every=10, decay=0.0)
    s, choices = t.init(2), []
    for gain in (0.8, 0.0, 1.3, 1.3, 0.7, 0.0):
        on, rounds = t.decide(s, 1)
        choices.append((bool(on), int(rounds)))
        s = t.observe(s, 1, on, rounds, gain)
    assert choices == [(True, 4), (False, 10), (True, 4), (True, 10), (True, 10), (False, 10)]
    assert s.gain[0] == 0 and s.wait[0] == 0


@pytest.mark.parametrize("options", [{"margin": 0}, {"probe": 0}, {"every": 0}, {"decay": 1.0}])
def test_bad_toggles_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Toggle(**options)
    with pytest.raises(ValueError, match="plain"):
        RoundCost(0.0, COST.speculative)


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
