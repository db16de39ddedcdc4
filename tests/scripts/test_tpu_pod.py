"""tpu_pod.py: prompts read and checked, hosts that agree, and results that a kill at any byte does not change."""

import dataclasses
import hashlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("jsonschema", reason="checks the result")

from safetensors.numpy import save_file  # noqa: E402

from scripts.pod import hosts, prompts, results  # noqa: E402
from spec_jax.engine.decoder import Result, Update  # noqa: E402
from spec_jax.engine.engine import Engine  # noqa: E402
from spec_jax.models.checkpoint import required_tensors  # noqa: E402
from spec_jax.models.config import LlamaConfig  # noqa: E402
from spec_jax.models.load import load_target  # noqa: E402
from spec_jax.sampling.settings import Sampling  # noqa: E402
from tests.models.conftest import TEMPLATE, TOKENS, tiny_backend  # noqa: E402
from tests.processes import environment, printed  # noqa: E402

SCRIPT = Path(__file__).parents[2] / "scripts" / "tpu_pod.py"
FIELDS = {
    "model_type": "llama",
    "vocab_size": len(TOKENS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}
LINES = [
    {"id": "greedy", "prompt": "the thing", "max_new_tokens": 12},
    {"id": 7, "prompt": [5, 6, 7], "temperature": 0.8, "seed": 3, "max_new_tokens": 9},
    {"id": "chat", "messages": [{"role": "user", "content": "12 in the"}], "temperature": 1.0},
    {"id": "ünï", "prompt": "the", "stop": ["in"], "temperature": 0.9, "logit_bias": {"9": 2.0}, "max_new_tokens": 20},
    {"id": "last", "prompt": "12", "temperature": 0.7, "top_p": 0.9, "banned_tokens": [4], "max_new_tokens": 6},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A random Llama with a tokenizer and a chat template."""
    folder, rng = tmp_path_factory.mktemp("llama"), np.random.default_rng(0)
    shapes = required_tensors(LlamaConfig.from_hf(FIELDS))
    save_file({n: rng.standard_normal(s, np.float32) for n, s in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(FIELDS))
    tiny_backend().save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


@pytest.fixture(scope="module")
def model(directory):
    return load_target(directory)


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model.target, 64)


@pytest.fixture
def file(tmp_path):
    """Write lines, as objects or as they are."""

    def write(lines, name="prompts.jsonl"):
        path = tmp_path / name
        path.write_text("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines))
        return path

    return write


def ask(lines, loaded, engine, /, **changes):
    defaults = prompts.Defaults(0, Sampling(), None, engine.max_len, "model")
    return prompts.ask(lines, loaded.tokenizer, dataclasses.replace(defaults, **changes))


def test_lines_become_requests(file, model, engine):
    one, two = file(LINES[:2], "b1.jsonl"), file([*LINES[2:], "\n"], "b2.jsonl")
    lines = prompts.read([str(one.parent / "b?.jsonl")])
    assert [x.id for x in lines] == ["greedy", "7", "chat", "ünï", "last"]
    assert [x.where for x in lines] == [f"{one}:1", f"{one}:2", *(f"{two}:{i}" for i in (1, 2, 3))]
    asked = ask(lines, model, engine, sampling=Sampling(presence_penalty=0.5), max_new_tokens=4)
    prompts.check(asked, engine, (0,))
    tokenizer = model.tokenizer
    chat = tokenizer.encode(tokenizer.apply_chat(LINES[2]["messages"]), special=False)
    assert [a.ids for a in asked[:3]] == [tuple(tokenizer.encode("the thing")), (5, 6, 7), tuple(chat)]
    assert [a.max_new_tokens for a in asked] == [12, 9, 4, 20, 6]
    assert asked[1].sampling == Sampling(temperature=0.8, presence_penalty=0.5) and asked[1].key == 3
    assert asked[3].stop == ("in",) and asked[3].sampling.logit_bias == {9: 2.0}
    assert asked[4].sampling.banned_tokens == (4,)


def test_a_line_keeps_its_seed_and_digest_wherever_it_stands(file, model, engine):
    of = lambda lines, **changes: {a.id: a for a in ask(prompts.read([str(file(lines))]), model, engine, **changes)}  # noqa: E731
    one, other = of(LINES), of(LINES[::-1])
    assert {id: (a.key, a.digest) for id, a in one.items()} == {id: (a.key, a.digest) for id, a in other.items()}
    assert len({a.key for a in one.values()}) == len(LINES)
    changed = {id: a.digest != one[id].digest for id, a in of(LINES, seed=1).items()}
    assert changed == {"greedy": True, "7": False, "chat": True, "ünï": True, "last": True}
    for changes in ({"model": "another"}, {"sampling": Sampling(frequency_penalty=0.1)}):
        assert all(a.digest != one[id].digest for id, a in of(LINES, **changes).items())


WRONG = [
    ("{", "not JSON"),
    ("[1]", "holds a list, takes an object"),
    ('{"id": "x", "prompt": "a", "prompt": "b"}', "not JSON: prompt is there more than once"),
    ('{"id": "x", "prompt": "a", "logit_bias": {"1": 1, "1": 2}}', "not JSON: 1 is there more than once"),
    ({"prompt": "a"}, "id: got None, takes a string or an integer"),
    ({"id": True, "prompt": "a"}, "id: got True"),
    ({"id": "x"}, "prompt, messages: takes one of the two"),
    ({"id": "x", "prompt": "a", "messages": []}, "prompt, messages: takes one of the two"),
    ({"id": "x", "prompt": "a", "temprature": 1}, "got fields temprature, takes id, prompt, messages, max_new_tokens"),
    ({"id": "good", "prompt": "a"}, "id: got 'good', which {path}:1 has already"),
]
WRONG_VALUES = [
    ({"prompt": ""}, "prompt: got '', takes a text that is not empty"),
    ({"prompt": [1, "2"]}, "prompt: got a list with other things than integers"),
    ({"prompt": [9999]}, "prompt: got token ids [9999]"),
    ({"prompt": []}, "prompt: got no tokens"),
    ({"messages": [{"role": "user"}]}, "messages: got [{'role': 'user'}], takes a list of objects with role and"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages: got [{'role': 'user', 'content': 7}], takes a list"),
    ({"prompt": "the", "max_new_tokens": 1000}, "max_new_tokens: got 1000"),
    ({"prompt": "the", "max_new_tokens": "9"}, "max_new_tokens: got '9'"),
    ({"prompt": list(range(5)) * 20}, "prompt: got 100 tokens, takes at most max_len 64"),
    ({"prompt": "the", "seed": -1}, "seed: got -1"),
    ({"prompt": "the", "stop": "in"}, "stop: got 'in', takes a list"),
    ({"prompt": "the", "temperature": -1}, "temperature: got -1"),
    ({"prompt": "the", "top_p": 0.5}, "top_k, top_p, min_p: got a truncation with temperature 0"),
    ({"prompt": "the", "logit_bias": {"x": 1}}, "logit_bias: got 'x', takes token ids"),
    ({"prompt": "the", "banned_tokens": [9999]}, "got token ids [9999]"),
    ({"prompt": "the", "banned_tokens": [-1]}, "banned_tokens: got -1, takes an integer"),
]


@pytest.mark.parametrize(("line", "message"), WRONG)
def test_a_bad_line_is_named(line, message, file):
    path = file([{"id": "good", "prompt": "a"}, "\n", line if isinstance(line, dict) else line + "\n"])
    with pytest.raises(ValueError) as error:
        prompts.read([str(path)])
    assert str(error.value).startswith(f"{path}:3: {message.format(path=path)}")


@pytest.mark.parametrize(("fields", "message"), WRONG_VALUES)
def test_a_bad_value_is_named(fields, message, file, model, engine):
    path = file([LINES[0], {"id": "x", **fields}])
    with pytest.raises(ValueError) as error:
        prompts.check(ask(prompts.read([str(path)]), model, engine), engine, (0,))
    assert str(error.value).startswith(f"{path}:2: ") and message in str(error.value)


def test_all_bad_lines_are_counted_and_no_file_is_an_error(file, tmp_path):
    with pytest.raises(ValueError, match=r"\.jsonl:1: .*\.jsonl:10: .* and 5 more lines$"):
        prompts.read([str(file(["{\n"] * 15))])
    with pytest.raises(ValueError, match="prompts: got no lines"):
        prompts.read([str(file(["\n"]))])
    for name in ("none.jsonl", "none-*.jsonl"):
        with pytest.raises(FileNotFoundError, match="is no file and matches none"):
            prompts.read([str(tmp_path / name)])


RECORDS = [{"id": str(i), "request": f"r{i}", "text": "é\n" * i} for i in range(4)]


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_half_written_line_is_cut_off(cut, tmp_path):
    path = results.path_of(tmp_path, 0)
    with results.Lines(path) as lines:
        for record in RECORDS:
            lines.append(record)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    with results.Lines(path) as again:
        assert results.finished(tmp_path, 0, 1) == {str(i): f"r{i}" for i in range(3)}
        again.append(RECORDS[3])
    assert path.read_bytes() == whole


def test_a_file_that_another_run_writes_is_left_alone(tmp_path):
    path = results.path_of(tmp_path, 0)
    with results.Lines(path):
        path.write_bytes(b"{}\nhalf a li")
        with pytest.raises(ValueError, match="--out: another run writes to .*results-00000.jsonl"):
            results.Lines(path)
        assert path.read_bytes() == b"{}\nhalf a li"


def test_a_long_half_line_and_a_file_of_nothing_else_are_cut(tmp_path):
    for kept in (b"", b"{}\n"):
        path = tmp_path / "results-00000.jsonl"
        path.write_bytes(kept + b"x" * 200_000)
        results.repair(path)
        assert path.read_bytes() == kept


def test_a_damaged_line_inside_is_an_error(tmp_path):
    path = results.path_of(tmp_path, 0)
    for damaged in (b'{"id": "a"\n', b"[]\n", b"\xff\n"):
        path.write_bytes(b'{"id": "b", "request": "r"}\n' + damaged + b'{"id": "c", "request": "r"}\n')
        with pytest.raises(ValueError, match=r"results-00000.jsonl:2: .* the file is damaged"):
            results.finished(tmp_path, 0, 1)


def test_files_of_hosts_that_are_no_more_count_and_those_of_others_do_not(tmp_path):
    for host in range(4):
        results.path_of(tmp_path, host).write_text(json.dumps({"id": f"{host}", "request": "r"}) + "\nhalf")
    assert set(results.finished(tmp_path, 1, 2)) == {"1", "2", "3"}
    assert results.path_of(tmp_path, 0).read_text().endswith("half"), "its own host mends it"


def rows_of(monkeypatch, *rows):
    monkeypatch.setattr(hosts, "gather", lambda value: [value if row is None else row.encode() for row in rows])


def test_hosts_that_differ_are_named(monkeypatch):
    parts = {"prompts": "abc", "--temperature": "0.8"}
    rows_of(monkeypatch, None, "abc\x1f0.8", "abc\x1f0.8")
    hosts.agree(parts)
    rows_of(monkeypatch, None, "abc\x1f0.7", "abc\x1f0.8")
    with pytest.raises(ValueError) as error:
        hosts.agree(parts)
    assert str(error.value) == (
        "the hosts do not agree, takes the same on all: --temperature: 0.8 on hosts 0, 2; 0.7 on host 1"
    )


def test_what_fails_on_one_host_fails_on_all(monkeypatch):
    def fail():
        raise FileNotFoundError("no such file")

    rows_of(monkeypatch, None, "", "no such file")
    with pytest.raises(ValueError, match="^host 2: no such file$"):
        hosts.all_or_none(lambda: 5)
    with pytest.raises(FileNotFoundError, match="^no such file$"):
        hosts.all_or_none(fail)
    rows_of(monkeypatch, None, "")
    assert hosts.all_or_none(lambda: 5) == 5


def test_a_wrong_layout_or_start_is_refused(monkeypatch):
    assert hosts.group(1, 1) == hosts.Group(0, 1, 0, 1, True, None)
    monkeypatch.setattr(jax, "local_device_count", lambda: 4)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    for tensor, expert in ((3, 1), (8, 1), (2, 3), (6, 1)):
        with pytest.raises(ValueError, match=f"--tensor, --expert: got {tensor} x {expert} devices"):
            hosts.group(tensor, expert)
    with pytest.raises(ValueError, match="--tensor: got 0"):
        hosts.group(0, 1)
    with pytest.raises(ValueError, match="--processes and --process-id"):
        hosts.start("host:1", None, None)
    with pytest.raises(ValueError, match="--process-id: got 2, takes 0 .. 1"):
        hosts.start("host:1", 2, 2)
    with pytest.raises(ValueError, match="--processes: got 0, takes at least 1"):
        hosts.start("host:1", 0, 0)
    with pytest.raises(ValueError, match="got no --coordinator"):
        hosts.start(None, 2, 0)


class Scripted:
    """A decoder whose texts are drawn from key and prompt alone, in a while that differs from request to request."""

    def __init__(self, engine, batch=2):
        self.engine, self.batch, self.waiting, self.next = engine, batch, [], 0

    def submit(self, ids, max_new_tokens, *, key, sampling, stop_strings):
        drawn = hashlib.sha256(repr((ids, max_new_tokens, key, sampling, stop_strings)).encode()).digest()
        self.waiting.append((self.next, ids, list(drawn[:max_new_tokens]), 1 + drawn[-1] % 4))
        self.next += 1
        return [self.next - 1]

    def step(self, chunk_rounds):
        updates, later = [], []
        for id, ids, tokens, wait in self.waiting[: self.batch]:
            if wait:
                later.append((id, ids, tokens, wait - 1))
            else:
                counters = {"rounds": len(tokens), "emitted": len(tokens)}
                result = Result(id, ids, tuple(tokens), repr(tokens), "budget", None, None, counters)
                updates.append(Update(id, (), "", result))
        self.waiting = later + self.waiting[self.batch :]
        return updates


@pytest.fixture
def run(monkeypatch, capsys, model):
    """Run the script in this process, maybe with a decoder of one's own; returns its last line."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    script = runpy.run_path(str(SCRIPT))

    def run(*args, decoder=None):
        monkeypatch.setattr(sys, "argv", ["tpu_pod.py", *map(str, args)])
        load = script["model"].load

        def fake(args, mesh):
            return script["model"].Loaded(model, decoder(), "scripted", "digest", "")

        with monkeypatch.context() as patch:
            patch.setattr(script["model"], "load", load if decoder is None else fake)
            script["main"]()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    run.script = script
    return run


class Killed(BaseException):
    pass


def test_a_kill_at_any_byte_does_not_change_the_results(run, file, directory, engine, tmp_path, monkeypatch):
    path = file(LINES)
    options = ("--prompts", path, "--model", directory, "--max-len", 64)
    start = lambda out: run(*options, "--out", out, decoder=lambda: Scripted(engine))  # noqa: E731
    whole = start(tmp_path / "whole")
    want = (tmp_path / "whole" / "results-00000.jsonl").read_bytes()
    assert whole["prompts"] == len(LINES) and whole["finished_before"] == 0
    assert [json.loads(x)["id"] for x in want.splitlines()] == [str(x["id"]) for x in LINES]

    real, inside = os.write, run.script["results"].os
    total = len(want) + (tmp_path / "whole" / "metrics-00000.jsonl").stat().st_size
    before = []
    for kill_at in range(0, total, 71):
        left, out = [kill_at], tmp_path / f"killed-{kill_at}"

        def write(fd, data, left=left):
            done = real(fd, data[: left[0]])
            left[0] -= done
            if done < len(data):
                raise Killed
            return done

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(inside, "write", write)
            start(out)
        assert list(out.glob("results-*"))
        result = start(out)
        before.append(result["finished_before"])
        assert (out / "results-00000.jsonl").read_bytes() == want
        ids = [json.loads(x)["id"] for x in (out / "metrics-00000.jsonl").read_text().splitlines()]
        assert set(ids) == {str(x["id"]) for x in LINES}
    assert sorted(set(before)) == list(range(len(LINES)))
    assert start(tmp_path / "whole")["finished_before"] == len(LINES)
    assert (tmp_path / "whole" / "results-00000.jsonl").read_bytes() == want


def test_results_by_another_prompt_or_setting_are_refused(run, file, directory, engine, tmp_path):
    options = ("--model", directory, "--max-len", 64, "--out", tmp_path / "out")
    start = lambda *more: run("--prompts", file(LINES), *options, *more, decoder=lambda: Scripted(engine))  # noqa: E731
    start()
    with pytest.raises(ValueError, match="has a result of 'greedy' .* by another prompt, settings or model"):
        start("--frequency-penalty", "0.5")
    added = run("--prompts", file([{"id": "new", "prompt": "the"}, *LINES]), *options, decoder=lambda: Scripted(engine))
    assert (added["prompts"], added["finished_before"], added["by_host"][0]["prompts"]) == (6, 5, 1)
    with pytest.raises(ValueError, match="which is a file, takes a folder"):
        run("--prompts", file(LINES), *options[:-1], file(LINES), decoder=lambda: Scripted(engine))


def test_the_text_is_the_decoders_own(run, file, directory, tmp_path, monkeypatch):
    kept = []
    load = run.script["model"].load
    monkeypatch.setattr(run.script["model"], "load", lambda *args: kept.append(load(*args)) or kept[-1])
    options = ("--prompts", file(LINES), "--model", directory, "--max-len", 64, "--batch", 2, "--drafter", "none")
    result = run(*options, "--out", tmp_path / "out", "--json", tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text()) == result
    records = [json.loads(x) for x in (tmp_path / "out" / "results-00000.jsonl").read_text().splitlines()]
    assert result["tokens"] == sum(len(r["tokens"]) for r in records) and result["mesh"] == {}
    decoder = kept[0].decoder
    lines = prompts.read([str(options[1])])
    for a, record in zip(ask(lines, kept[0].target, decoder.engine, model=kept[0].digest), records, strict=True):
        own = {"key": a.key, "sampling": a.sampling, "stop_strings": a.stop}
        (alone,) = decoder.generate([a.ids], a.max_new_tokens, **own)
        assert (record["id"], record["request"]) == (a.id, a.digest)
        assert (record["text"], tuple(record["tokens"])) == (alone.text, alone.tokens)
        assert (record["finish"], record["prompt_tokens"]) == (alone.finish, len(a.ids))
    metrics = [json.loads(x) for x in (tmp_path / "out" / "metrics-00000.jsonl").read_text().splitlines()]
    assert sum(m["target_passes"] for m in metrics) == result["target_passes"]


def command(path, out, *options):
    return [sys.executable, str(SCRIPT), "--prompts", str(path), "--out", str(out), *map(str, options)]


def finish(*processes):
    """Exit status, printed results and errors of processes that run side by side."""
    outputs = [(p, *p.communicate()) for p in processes]
    return [(p.returncode, printed(out), err) for p, out, err in outputs]


def popen(*args, devices=1):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(args[0], env=environment(devices), **pipes)


def records_of(folder):
    found = [json.loads(x) for path in sorted(folder.glob("results-*.jsonl")) for x in path.read_text().splitlines()]
    return sorted(found, key=lambda r: r["id"])


ASKED = [
    {"id": i, "prompt": text, "temperature": 0.8 * (i % 2), "max_new_tokens": 24 + i}
    for i, text in enumerate(
        ["def add(x, y):\n", "import os\n", "class A:\n", "for i in ", "return ", "if __name__", "try:\n", "print("]
    )
]
OPTIONS = ("--drafter", "ngram", "--max-len", 64, "--batch", 2, "--chunk-rounds", 2)


SPANNING = ("--tensor", 2, "--drafter", "suffix")  # over both processes, which weigh one measured cost


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    path = tmp_path_factory.mktemp("asked") / "prompts.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in ASKED))
    return path


@pytest.fixture(scope="module")
def alone(asked, directory, tmp_path_factory):
    """Results of one process with one device, and the options that gave them."""
    folder, options = tmp_path_factory.mktemp("alone"), ("--model", directory, *OPTIONS)
    ((code, found, err),) = finish(popen(command(asked, folder, *options)))
    assert code == 0, err
    assert [result["finish"] for result in found] == [{"budget": len(ASKED)}]
    return folder, options


def test_what_gloo_prints_in_pieces_is_no_result():
    pieces = ["[Gloo] Rank 0[Gloo] Rank 1 is connected to ", " is connected to 1 peer ranks. ", "Expected ranks: 1", ""]
    assert printed(
        "\n".join([*pieces, '{"hosts": 2}', " peer ranks. Expected number of connected peer ranks is : 1"])
    ) == [{"hosts": 2}]
    assert printed("\n".join(pieces)) == []


@pytest.mark.slow
def test_killed_runs_end_like_one_that_was_not(asked, alone, tmp_path):
    whole, options = alone
    file, killed = tmp_path / "results-00000.jsonl", 0
    for lines in (0, 1, 3, 6):
        process = popen(command(asked, tmp_path, *options))
        while process.poll() is None and not (file.exists() and file.read_bytes().count(b"\n") >= lines):
            time.sleep(0.01)
        killed += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert killed == 4
    ((code, found, err),) = finish(popen(command(asked, tmp_path, *options)))
    assert code == 0, err
    assert found[-1]["finished_before"] >= 6
    assert file.read_bytes() == (whole / "results-00000.jsonl").read_bytes()


def two(path, out, *options, devices=1, differing=()):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    shared = ("--coordinator", address, "--processes", 2)
    own = [(*shared, "--process-id", i, *(differing if i else ())) for i in range(2)]
    return finish(*[popen(command(path, out, *options, *more), devices=devices) for more in own])


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "split"), [(1, ()), (2, ("--tensor", 2)), (1, SPANNING)])
def test_two_processes_answer_like_one(devices, split, asked, alone, tmp_path):
    whole, options = alone
    outputs = two(asked, tmp_path, *options, *split, devices=devices)
    assert [code for code, _, _ in outputs] == [0, 0], outputs
    (result,) = outputs[0][1]
    assert outputs[1][1] == [] and result["hosts"] == 2 and result["groups"] == (1 if devices == 1 and split else 2)
    assert records_of(tmp_path) == records_of(whole)
    assert len(list(tmp_path.glob("results-*"))) == result["groups"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "small_hybrid"])
def test_eight_devices_answer_like_one(model, asked, alone, tmp_path):
    whole, options = alone
    if model == "small_hybrid":
        whole, options = tmp_path / "alone", ("--model", model, *OPTIONS)
        ((code, _, err),) = finish(popen(command(asked, whole, *options)))
        assert code == 0, err
    out = tmp_path / "out"
    ((code, found, err),) = finish(popen(command(asked, out, *options, "--tensor", 2, "--expert", 2), devices=8))
    assert code == 0, err
    assert found[-1]["mesh"] == {"data": 2, "expert": 2, "tensor": 2}
    assert records_of(out) == records_of(whole)


@pytest.mark.slow
def test_hosts_with_other_settings_stop_with_one_error(asked, alone, tmp_path):
    outputs = two(asked, tmp_path, *alone[1], differing=("--temperature", 0.5))
    message = "the hosts do not agree, takes the same on all: --temperature: 0.0 on host 0; 0.5 on host 1"
    for code, found, err in outputs:
        assert code == 2 and found == [] and err.splitlines()[-1] == f"error: {message}"
