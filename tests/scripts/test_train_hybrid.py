"""The small hybrid's corpus, vocabulary and script, on a toy run."""

import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("grain", reason="reads the batches")
pytest.importorskip("tensorboardX", reason="writes the events")

from scripts.hybrid import corpus, vocabulary  # noqa: E402

SCRIPTS = Path(__file__).parents[2] / "scripts"
TINY = "hidden_size=16 num_attention_heads=2 num_key_value_heads=1 head_dim=8 partial_rotary_factor=0.5 num_experts=4"
TINY += " linear_num_key_heads=1 linear_num_value_heads=2 linear_key_head_dim=8 linear_value_head_dim=8"
TINY += " num_hidden_layers=2 full_attention_interval=2 moe_intermediate_size=8 shared_expert_intermediate_size=8"


@pytest.fixture(scope="module")
def library():
    return corpus.stdlib_sources()


def test_the_corpus_is_the_library_without_tests_and_tables(library):
    names = [source.name for source in library]
    assert names == sorted(set(names)) and len(names) > 300
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    parts = {part for name in names for part in Path(name).parts}
    assert not parts & {"site-packages", "encodings", "pydoc_data", "test", "tests", "idle_test"}
    assert library == corpus.stdlib_sources()


def test_held_out_files_depend_on_their_names_alone(library):
    train, held_out = corpus.split(library)
    assert len(train) + len(held_out) == len(library) and 0.02 < len(held_out) / len(library) < 0.08
    assert {"operator.py", "runpy.py", "sysconfig.py"} <= {source.name for source in held_out}
    assert corpus.split(train[:50] + held_out[:3])[1] == held_out[:3]


def test_tests_add_text_to_train_on_and_none_to_measure_on(tmp_path):
    for i in range(60):
        for name in (f"a{i}.py", f"test/b{i}.py"):
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"x = {i}\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "empty.py").write_text("\n")
    alone, both = (corpus.split(corpus.stdlib_sources(tests, tmp_path)) for tests in (False, True))
    assert alone[1] == both[1] and len(alone[0]) + len(alone[1]) == 60 and len(both[0]) > len(alone[0]) + 50
    assert corpus.fingerprint(alone[0]) != corpus.fingerprint(both[0])
    with pytest.raises(FileNotFoundError, match="holds no Python sources"):
        corpus.stdlib_sources(root=tmp_path / "nowhere")


def test_the_vocabulary_spells_every_text(library):
    tokenizer = vocabulary.build((source.text for source in library[:40]), 400)
    assert tokenizer.get_vocab_size() == 400 and tokenizer.token_to_id(vocabulary.EOS) == 0
    for text in (library[50].text, "é ∀ \t\r\n \x00 日本 __init__\n\n\n    x", " "):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode(library[50].text).ids) < len(library[50].text) / 1.5
    with pytest.raises(ValueError, match="size: got 256"):
        vocabulary.build(["x"], 256)


def run(monkeypatch, capsys, *args):
    monkeypatch.setattr(sys, "argv", ["train_hybrid.py", *map(str, args)])
    monkeypatch.syspath_prepend(str(SCRIPTS))
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(SCRIPTS / "train_hybrid.py"), run_name="__main__")
    return exit.value.code, *capsys.readouterr()


def toy(folder, *more):
    sizes = [word for size in TINY.split() for word in ("--size", size)]
    return (
        *("--run", folder / "run", "--out", folder / "out", "--files", 12, "--vocabulary", 300, "--batch", 2),
        *("--context", 32, "--warmup", 2, "--mtp-rows", 1, *sizes, *more),
    )


@pytest.mark.slow
def test_a_toy_run_learns_resumes_and_exports(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="draws the plot")
    code, _, err = run(monkeypatch, capsys, *toy(tmp_path, "--steps", 6, "--decay-steps", 2))
    assert code == 0, err
    code, _, err = run(monkeypatch, capsys, *toy(tmp_path, "--steps", 9))
    assert code == 2 and "--run: " in err and "--resume" in err
    code, _, err = run(monkeypatch, capsys, *toy(tmp_path, "--resume", "--steps", 9, "--seed", 1))
    assert code == 2 and "seed: got 1, takes 0" in err
    code, out, err = run(monkeypatch, capsys, *toy(tmp_path, "--resume", "--steps", 40, "--decay-steps", 4))
    assert code == 0, err
    rows = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 41))
    assert rows[-1]["held_out_loss"] < rows[0]["loss"] - 0.3
    card = (tmp_path / "out/README.md").read_text()
    figures = dict(part.split() for part in out.splitlines()[-1].split(": ")[-1].split(", "))
    said = float(re.search(r"\| nats per token \| ([\d.]+) \|", card)[1])
    assert "40 steps" in card and abs(said - float(figures["held_out_loss"])) < 6e-4  # both are rounded
    assert float(figures["held_out_loss"]) < rows[0]["loss"] - 0.3 > float(figures["long_loss"])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("README.md", "config.json", "generation_config.json", "loss.png"),
        *("model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    }
    transformers = pytest.importorskip("transformers", reason="loads what the script wrote")
    model = transformers.Qwen3NextForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    [source] = corpus.split(corpus.stdlib_sources())[1][:1]
    ids = tokenizer(source.text, return_tensors="pt").input_ids[:, :64]
    assert tokenizer.decode(ids[0]) == source.text[: len(tokenizer.decode(ids[0]))]
    loss = model(ids, labels=ids).loss.item()
    assert np.isfinite(loss) and loss < np.log(300)


WRONG = [
    (("--context", "2"), "--context: got 2, takes more than the MTP head's 2 steps"),
    (("--size", "depth=3"), "--size: got 'depth=3', takes NAME=NUMBER"),
    (("--size", "linear_num_key_heads=3"), "linear_num_value_heads is 4; taken: a multiple of linear_num_key_heads"),
    (("--stop-at", "25:00"), "--stop-at: got '25:00', takes a time of day"),
    (("--resume",), "holds no checkpoint to go on from"),
    (("--weights", "nowhere"), "nowhere: no such file or directory"),
    (("--weights", "nowhere", "--size", "head_dim=8"), "--size: got head_dim=8, takes nothing with --weights"),
    (("--export-only",), "--export-only: got no --resume"),
    (("--batch", "0"), "--batch: got 0, takes 1 or more"),
]


@pytest.mark.parametrize(("args", "message"), WRONG, ids=[" ".join(a) for a, _ in WRONG])
def test_mistakes_are_one_line(args, message, tmp_path, monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, "--run", tmp_path / "run", "--files", 3, "--vocabulary", 300, *args)
    assert code == 2 and err.startswith("error: ") and message in err and err.count("\n") == 1
