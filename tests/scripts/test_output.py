import argparse
import json
from pathlib import Path

import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest

from scripts.benches import output, schema

SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "required": ["speedup"],
    "additionalProperties": False,
    "properties": {"speedup": {"type": "number"}, "lengths": {"type": "array", "items": {"type": "integer"}}},
}


def parse(*arguments, plots=True):
    parser = argparse.ArgumentParser()
    output.add_arguments(parser, plots)
    return parser.parse_args(arguments)


def test_the_result_is_the_last_line(capsys):
    print("working")
    output.finish({"speedup": 1.5, "lengths": (1, 2)}, SCHEMA, parse("--quick"))
    last = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last) == {"speedup": 1.5, "lengths": [1, 2]}


def test_arrays_become_plain_numbers(capsys):
    output.finish({"speedup": np.float32(1.5), "lengths": jnp.arange(2)}, SCHEMA, parse())
    assert json.loads(capsys.readouterr().out) == {"speedup": 1.5, "lengths": [0, 1]}


def test_json_file_is_replaced_whole(tmp_path, capsys, monkeypatch):
    file = tmp_path / "out.json"
    file.write_text("old")
    output.finish({"speedup": 2}, SCHEMA, parse("--json", str(file)))
    assert file.read_text() == capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [file]

    def full_disk(self, content):
        open(self, "wb").close()
        raise OSError("no space")

    monkeypatch.setattr(output.Path, "write_bytes", full_disk)
    with pytest.raises(OSError, match="no space"):
        output.finish({"speedup": 3}, SCHEMA, parse("--json", str(file)))
    assert json.loads(file.read_text()) == {"speedup": 2}
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({}, r"\$: 'speedup' is a required property"),
        ({"speedup": "2x"}, r"\$\.speedup"),
        ({"speedup": 1, "lengths": [1, 2.5]}, r"\$\.lengths\[1\]"),
        ({"speedup": 1, "other": 1}, "other"),
        ({"speedup": float("nan")}, "JSON compliant"),
    ],
)
def test_a_result_that_does_not_fit_is_refused_but_not_lost(result, message, tmp_path, capsys):
    file = tmp_path / "out.json"
    with pytest.raises(ValueError, match=message):
        output.finish(result, SCHEMA, parse("--json", str(file)))
    out, err = capsys.readouterr()
    assert out == "" and err.strip() == str(result) and not file.exists()


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_plot_draws_the_result(suffix, start, tmp_path, capsys):
    file = tmp_path / f"out{suffix}"
    seen = []

    def plot(result, figure):
        seen.append(result)
        figure.subplots().bar(["speedup"], [result["speedup"]])

    output.finish({"speedup": 2.0}, SCHEMA, parse("--plot", str(file)), plot)
    assert file.read_bytes().startswith(start) and seen == [{"speedup": 2.0}]
    assert capsys.readouterr().out == '{"speedup": 2.0}\n'


def test_a_plot_that_fails_leaves_the_json(tmp_path):
    def plot(result, figure):
        raise RuntimeError("can't draw")

    args = parse("--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png"))
    with pytest.raises(RuntimeError, match="can't draw"):
        output.finish({"speedup": 2.0}, SCHEMA, args, plot)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_plot_without_a_drawing_is_refused(tmp_path, capsys):
    with pytest.raises(ValueError, match="--plot"):
        output.finish({"speedup": 2.0}, SCHEMA, parse("--plot", str(tmp_path / "a.png")))
    with pytest.raises(SystemExit):
        parse("--plot", str(tmp_path / "a.png"), plots=False)
    assert "--plot" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "no/such/folder/a.json"], "no/such/folder"),
        (["--json", "."], "is a folder"),
        (["--plot", "a.exe"], ".pdf .png .svg"),
        (["--plot", "no/such/folder/a.png"], "no/such/folder"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_at_once(arguments, message, capsys):
    with pytest.raises(SystemExit):
        parse(*arguments)
    assert message in capsys.readouterr().err


def test_schema_is_read_from_beside_the_subcommand(tmp_path):
    (tmp_path / "speed.schema.json").write_text(json.dumps(SCHEMA))
    assert schema.load("speed", tmp_path) == SCHEMA
    with pytest.raises(FileNotFoundError, match="'sped'"):
        schema.load("sped", tmp_path)
    (tmp_path / "bad.schema.json").write_text('{"type": "objekt"}')
    with pytest.raises(jsonschema.SchemaError):
        schema.load("bad", tmp_path)


SCHEMA_FILES = sorted(Path(schema.__file__).parent.glob("*.schema.json"))


@pytest.mark.parametrize("path", SCHEMA_FILES, ids=lambda path: path.name)
def test_every_schema_in_the_repository_is_one(path):
    assert schema.load(path.name.removesuffix(".schema.json"))["type"] == "object"
