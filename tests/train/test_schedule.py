import pytest

from spec_jax.train.schedule import ByClock, BySteps


def test_by_steps_warms_up_stays_and_decays():
    rate = BySteps(peak=2.0, warmup=3, total=20, decay=4, floor=0.1)
    assert [rate(i) for i in range(4)] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert {rate(i) for i in range(3, 17)} == {2.0}
    assert [rate(i) for i in (17, 18, 19)] == pytest.approx([2 * (0.1 + 0.9 * part) for part in (0.75, 0.5, 0.25)])
    assert rate(20) is None and rate(25) is None


def test_no_decay_ends_at_the_peak():
    assert BySteps(peak=1.0, warmup=0, total=5, decay=0)(4) == 1.0


def test_by_clock_follows_the_time_left():
    time = [0.0]
    rate = ByClock(peak=2.0, warmup=1, stop=100.0, decay=20.0, now=lambda: time[0])
    assert rate(0) == 1.0 and rate(1) == 2.0
    time[0] = 80.0
    assert rate(50) == 2.0
    time[0] = 95.0  # also after a pause of any length
    assert rate(51) == pytest.approx(0.5)
    time[0] = 100.0
    assert rate(52) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peak": 0.0}, "peak: got 0.0"),
        ({"warmup": -1}, "warmup: got -1"),
        ({"floor": 1.5}, "floor: got 1.5"),
        ({"decay": 11}, "decay: got 11, takes 0 to total, 10"),
    ],
)
def test_mistakes_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        BySteps(**{"peak": 1.0, "warmup": 0, "total": 10, "decay": 1} | change)
