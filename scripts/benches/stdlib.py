"""Functions and docstrings of the running Python's standard library, read from its source files, importing none."""

import ast
import functools
import inspect
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def folder() -> Path:
    """Where the running Python keeps its standard library."""
    return Path(sysconfig.get_path("stdlib"))


def function(module: str, qualname: str, root: Path | None = None) -> str:
    """The source of a function or method, decorators included, unindented.

    Raises LookupError if this Python's standard library has no such function in a source file.
    """
    text, tree = _read(module, root or folder())
    node = _find(module, qualname, tree)
    if isinstance(node, ast.ClassDef):
        raise LookupError(f"{module}.{qualname} is a class, not a function")
    assert node.end_lineno is not None
    start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return textwrap.dedent("\n".join(text.splitlines()[start - 1 : node.end_lineno]))


def docstring(module: str, qualname: str = "", root: Path | None = None) -> str:
    """The unindented docstring of a module (qualname ""), class or function.

    Raises LookupError if this Python's standard library has no such docstring in a source file.
    """
    _, tree = _read(module, root or folder())
    text = ast.get_docstring(_find(module, qualname, tree) if qualname else tree)
    if not text:
        raise LookupError(f"{module}{'.' if qualname else ''}{qualname} has no docstring")
    return inspect.cleandoc(text)


def definitions(body: Iterable[ast.AST], prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """(qualname, node) of every function, method and class, also those under `if` and `try`; none inside a function."""
    for node in body:
        if isinstance(node, Definition):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from definitions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.stmt | ast.ExceptHandler):
            yield from definitions(ast.iter_child_nodes(node), prefix)


def _find(module: str, qualname: str, tree: ast.Module) -> Definition:
    found = [node for name, node in definitions(tree.body) if name == qualname]
    if len(found) != 1:
        raise LookupError(f"{module} defines {qualname} {len(found)} times, not once")
    return found[0]


@functools.cache
def _read(module: str, root: Path) -> tuple[str, ast.Module]:
    stem = root.joinpath(*module.split("."))
    for path in (stem.with_suffix(".py"), stem / "__init__.py"):
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            return text, ast.parse(text)
    raise LookupError(f"no source file of the module {module} under {root}")
