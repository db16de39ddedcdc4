import pytest

progress = pytest.importorskip("spec_jax.train.progress", reason="rich shows the bar", exc_type=ImportError)


def test_without_a_terminal_some_rows_are_lines(capsys):
    with progress.Progress(10, ("loss", "held_out"), tokens=100, line_every=3, always=("held_out",)) as bar:
        for step in range(1, 8):
            row = {"step": step, "loss": 2.0 / step, "rate": 0.1, "steps_per_second": 4.0}
            bar.report(row | ({"held_out": 1.5} if step == 6 else {}))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 1", "step 4", "step 6", "step 7"]
    assert lines[2] == "step 6: loss 0.3333, held_out 1.5, 400 tokens/s"


def test_a_row_has_only_what_it_has():
    bar = progress.Progress(None)
    assert bar.text({"step": 1, "loss": 1.0, "steps_per_second": 2.0}) == "loss 1"
