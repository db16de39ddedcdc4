import pytest

logs = pytest.importorskip("spec_jax.train.logs", reason="tensorboardX writes the events", exc_type=ImportError)


def test_rows_come_back_and_a_resumed_run_drops_what_it_does_again(tmp_path):
    log = logs.Log(tmp_path)
    for step in range(1, 6):
        log.write(step, {"loss": 10 / step})
    log.close()
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    assert [row["step"] for row in logs.read(tmp_path)] == [1, 2, 3, 4, 5]
    log = logs.Log(tmp_path, step=3)
    assert log.write(4, {"loss": 1}) == {"step": 4, "loss": 1.0}
    log.close()
    assert [row["loss"] for row in logs.read(tmp_path)] == [10, 5, 10 / 3, 1]


def test_there_are_tensorboard_events(tmp_path):
    log = logs.Log(tmp_path)
    log.write(1, {"loss": 2.5})
    log.close()
    [events] = tmp_path.glob("events.out.tfevents.*")
    assert b"loss" in events.read_bytes()


def test_no_log_has_no_rows(tmp_path):
    assert logs.read(tmp_path) == []


def test_smooth_is_the_mean_of_the_neighbours():
    assert logs.smooth([0, 3, 6, 0], 1) == pytest.approx([1.5, 3, 3, 3])
    assert logs.smooth([1, 2], 0) == [1, 2]


def test_plot_draws_what_is_there(tmp_path):
    pytest.importorskip("matplotlib", reason="draws the plot")
    rows = [{"step": i, "loss": 5 / (i + 1)} | ({"held": 2.0} if i % 10 == 9 else {}) for i in range(60)]
    empty, full = tmp_path / "empty.png", tmp_path / "full.png"
    logs.plot([], empty, {"loss": "loss"}, "none")
    logs.plot(rows, full, {"loss": "loss", "held": "held out", "absent": "absent"}, "all")
    assert full.read_bytes()[:4] == b"\x89PNG" and full.stat().st_size > empty.stat().st_size
