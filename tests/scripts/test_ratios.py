import itertools

import pytest

from scripts.benches.ratios import in_turn, median_ratio


def test_rounds_rotate_and_the_warm_up_is_not_counted():
    order = []
    ticks = itertools.count()
    functions = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = in_turn(functions, repeats=3, warm_up=1, clock=lambda: next(ticks))
    assert "".join(order) == "cab" + "abc" + "bca" + "cab"
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3, "c": 3}
    assert all(time > 0 for times in seconds.values() for time in times)


def test_the_time_of_an_array_counts_until_it_is_there():
    waited = []

    class Slow:
        def block_until_ready(self):
            waited.append(1)

    in_turn({"a": Slow}, repeats=2, warm_up=0)
    assert len(waited) == 2


def test_the_ratio_is_taken_round_by_round():
    # The machine is ten times slower in the last two rounds; a ratio of medians would be 20 / 1.
    assert median_ratio([2.0, 20.0, 20.0], [1.0, 1.0, 10.0]) == {"median": 2, "least": 2, "greatest": 20, "rounds": 3}


@pytest.mark.parametrize(
    ("baseline", "candidate", "message"),
    [([], [], "0 and 0"), ([1.0], [1.0, 2.0], "1 and 2"), ([1.0], [0.0], "not positive")],
)
def test_times_that_give_no_ratio_are_refused(baseline, candidate, message):
    with pytest.raises(ValueError, match=message):
        median_ratio(baseline, candidate)


@pytest.mark.parametrize(("functions", "repeats", "warm_up"), [({}, 1, 1), ({"a": int}, 0, 1), ({"a": int}, 1, -1)])
def test_a_run_that_measures_nothing_is_refused(functions, repeats, warm_up):
    with pytest.raises(ValueError, match="got"):
        in_turn(functions, repeats, warm_up)
