"""Chooses the standard library's share of the prompts: writes data/code_edit.json and data/summary.json.

Only what reads the same in every standard library given is taken, so that the prompts are the same under each of them.
The newest Python runs it, since an older one can't parse a newer library:

    python3.13 scripts/benches/choose_prompts.py /usr/lib/python3.11 /usr/lib/python3.12

The order is that of a hash of the seed and the name: another Python's own random numbers play no part.
"""

import argparse
import ast
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import stdlib

SEED = 0
PROMPTS, SPARES = 16, 8
# Parts that some systems package apart from Python, and what is no library.
SKIPPED = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "tkinter",
    "turtle",
    "turtledemo",
    "site-packages",
    "ensurepip",
    "distutils",
}
DATA = Path(__file__).with_name("data")


def main() -> None:
    """Write both lists."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("others", nargs="*", type=Path, help="standard libraries of other Pythons")
    others = parser.parse_args().others
    _write("code_edit", _one_per_module(_functions(others), kinds=len(EDITS)))
    _write("summary", _one_per_module(_docstrings(others), kinds=1))


def _functions(others: list[Path]) -> Iterator[dict]:
    for module, tree in _modules():
        for qualname, node in stdlib.definitions(tree.body):
            if isinstance(node, ast.ClassDef):
                continue
            text = _same_everywhere(stdlib.function, module, qualname, others)
            if text is None or not 900 <= len(text) <= 1600 or not 20 <= len(text.splitlines()) <= 50 or "```" in text:
                continue
            kind = int(_rank("kind", module, qualname), 16) % len(EDITS)
            instruction = EDITS[kind](node)
            if instruction:
                yield {"kind": kind, "module": module, "qualname": qualname, "instruction": instruction}


def _docstrings(others: list[Path]) -> Iterator[dict]:
    for module, tree in _modules():
        for qualname, _ in [("", None), *stdlib.definitions(tree.body)]:
            text = _same_everywhere(stdlib.docstring, module, qualname, others)
            if text is None or not 900 <= len(text) <= 2600 or ">>>" in text:
                continue
            words = re.findall(r"[A-Za-z']+", text)
            if sum(map(len, words)) > 0.76 * len(text):
                yield {"kind": 0, "module": module, "qualname": qualname}


def _rename(node: ast.AST) -> str | None:
    fixed = {a.arg for a in ast.walk(node) if isinstance(a, ast.arg)}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Global | ast.Nonlocal):
            fixed.update(inner.names)
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    uses = [n.id for n in names]
    stored = {n.id for n in names if isinstance(n.ctx, ast.Store)} - fixed
    often = sorted(
        (name for name in stored if len(name) > 2 and uses.count(name) >= 3), key=lambda n: (-uses.count(n), n)
    )
    if not often:
        return None
    return f"Rename the variable `{often[0]}` to `{often[0]}_value` in the following Python function."


def _document(node: ast.AST) -> str | None:
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return None if ast.get_docstring(node) else "Add a one-line docstring to the following Python function."


def _annotate(node: ast.AST) -> str | None:
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    arguments = [a for a in node.args.args if a.arg not in ("self", "cls")]
    if len(arguments) < 2 or any(a.annotation for a in arguments):
        return None
    return "Add type hints to the parameters of the following Python function."


def _log(node: ast.AST) -> str | None:
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    line = f'logging.debug("{node.name} called")'
    return f"Add the line `{line}` at the start of the body of the following Python function."


EDITS: list[Callable[[ast.AST], str | None]] = [_rename, _document, _annotate, _log]


def _modules() -> Iterator[tuple[str, ast.Module]]:
    root = stdlib.folder()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part in SKIPPED or part.startswith("_") or "-" in part for part in parts):
            module = ".".join(parts)
            yield module, ast.parse(path.read_text(encoding="utf-8"))


def _same_everywhere(read: Callable[..., str], module: str, qualname: str, others: list[Path]) -> str | None:
    try:
        texts = {read(module, qualname, root) for root in (None, *others)}
    except LookupError:
        return None
    text = texts.pop()
    return text if not texts and text.isascii() else None


def _one_per_module(candidates: Iterator[dict], kinds: int) -> list[dict]:
    """PROMPTS + SPARES of the candidates: each of another top-level module, the kinds in turn."""
    ranked = sorted(candidates, key=lambda c: _rank(c["module"], c["qualname"]))
    chosen, used = [], set()
    while len(chosen) < PROMPTS + SPARES:
        kind = len(chosen) % kinds
        pick = next(c for c in ranked if c["kind"] == kind and c["module"].split(".")[0] not in used)
        used.add(pick["module"].split(".")[0])
        chosen.append({key: value for key, value in pick.items() if key != "kind"})
    return chosen


def _rank(*name: str) -> str:
    return hashlib.sha256("/".join([str(SEED), *name]).encode()).hexdigest()


def _write(name: str, chosen: list[dict]) -> None:
    listed = {"seed": SEED, "prompts": chosen[:PROMPTS], "spares": chosen[PROMPTS:]}
    DATA.joinpath(f"{name}.json").write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
