"""Imports run downward only."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the bottom up. A part may import parts of lower layers, and of its own layer as long as these don't import it.
LAYERS = [
    {"tree", "sampling", "noise", "checks"},
    {"topology", "verify"},
    {"models"},
    {"drafters"},
    {"control"},
    {"engine"},
    {"rollout", "train", "audit"},
    {"__init__"},
    {"configs", "scripts"},
]
LAYER = {part: level for level, parts in enumerate(LAYERS) for part in parts}
PACKAGES = ("spec_jax", "pallas_kernels", "configs", "scripts")


def modules(root: Path) -> Iterator[tuple[str, bool, ast.Module]]:
    """(dotted name, is it a package, syntax tree) of every file; configs/ goes by the name it is imported by."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if parts[:2] == ("spec_jax", "configs"):
                continue
            is_package = parts[-1] == "__init__"
            parts = parts[:-1] if is_package else parts
            parts = ("spec_jax", *parts) if parts[0] == "configs" else parts
            yield ".".join(parts), is_package, ast.parse(path.read_text(encoding="utf-8"))


def imported(module: str, is_package: bool, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported anywhere in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")
            above = parents[: len(parents) + is_package - node.level] if node.level else []
            base = [*above, *([node.module] if node.module else [])]
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def part_of(name: str, root: Path) -> str | None:
    """The part of the project that a dotted name belongs to; None if it is no part."""
    package, *rest = name.split(".")
    if package in ("scripts", "pallas_kernels", "configs"):
        return package
    if package != "spec_jax":
        return None
    inside = root / "spec_jax"
    is_part = rest and (rest[0] in LAYER or (inside / rest[0]).is_dir() or (inside / f"{rest[0]}.py").is_file())
    return rest[0] if is_part else "__init__"


def faults(root: Path) -> list[str]:
    """What breaks the order."""
    found, sideways = [], {}
    for module, is_package, tree in modules(root):
        part = part_of(module, root)
        if part != "pallas_kernels" and part not in LAYER:
            found.append(f"{module}: {part} has no place in LAYERS")
            continue
        for line, name in imported(module, is_package, tree):
            other = part_of(name, root)
            where = f"{module}:{line} imports {name}"
            if other is None or other == part:
                continue
            if part == "pallas_kernels":
                found.append(f"{where}: pallas_kernels imports nothing of the project")
            elif other == "pallas_kernels":
                continue
            elif name.split(".")[0] == "configs":
                found.append(f"{where}: configs is imported as spec_jax.configs")
            elif other not in LAYER:
                found.append(f"{where}: {other} has no place in LAYERS")
            elif LAYER[other] > LAYER[part]:
                found.append(f"{where}: {other} is above {part}")
            elif LAYER[other] == LAYER[part]:
                sideways[part, other] = where
    found += [
        f"{where}: {other} imports {part} too" for (part, other), where in sideways.items() if (other, part) in sideways
    ]
    return found


def test_imports_run_downward():
    assert len(list(modules(ROOT))) > 20
    assert faults(ROOT) == []


@pytest.mark.parametrize(
    ("file", "line", "fault"),
    [
        ("spec_jax/models/a.py", "from spec_jax.engine.loop import run", "engine is above models"),
        ("spec_jax/models/a.py", "import spec_jax.engine.loop as loop", "engine is above models"),
        ("spec_jax/models/a.py", "from spec_jax import tree, engine", "engine is above models"),
        ("spec_jax/models/a.py", "from ..engine.loop import run", "engine is above models"),
        ("spec_jax/models/a.py", "from .. import engine", "engine is above models"),
        ("spec_jax/models/__init__.py", "from ..engine import loop", "engine is above models"),
        ("spec_jax/models/deep/a.py", "from ...drafters import none", "drafters is above models"),
        ("spec_jax/models/a.py", "def f():\n    import spec_jax.control", "control is above models"),
        ("spec_jax/tree.py", "if TYPE_CHECKING:\n    from spec_jax import verify", "verify is above tree"),
        ("spec_jax/tree.py", "from . import verify", "verify is above tree"),
        ("spec_jax/engine/a.py", "from spec_jax import generate", "__init__ is above engine"),
        ("spec_jax/engine/a.py", "from spec_jax import configs", "configs is above engine"),
        ("spec_jax/train/a.py", "from scripts import bench", "scripts is above train"),
        ("spec_jax/extra.py", "", "extra has no place in LAYERS"),
        ("spec_jax/models/a.py", "from spec_jax.engine_two import x", "__init__ is above models"),
        ("pallas_kernels/op/a.py", "from spec_jax.tree import Tree", "pallas_kernels imports nothing of the project"),
        ("scripts/a.py", "from configs import eagle", "configs is imported as spec_jax.configs"),
        ("configs/a.py", "from scripts.bench import x\nfrom spec_jax.engine import y", None),
        (
            "spec_jax/models/a.py",
            "from pallas_kernels.op import api\nfrom . import b\nimport jax\nimport spec_jax.tree",
            None,
        ),
        ("spec_jax/__init__.py", "from .engine import run\nfrom .rollout import rollout", None),
        ("scripts/a.py", "from spec_jax import generate\nfrom spec_jax.configs import eagle\nfrom . import b", None),
    ],
)
def test_a_wrong_import_is_caught(tmp_path, file, line, fault):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(line)
    found = faults(tmp_path)
    assert len(found) == (fault is not None) and all(entry.endswith(fault) for entry in found)


def test_two_parts_of_a_layer_must_not_import_each_other(tmp_path):
    (tmp_path / "spec_jax").mkdir()
    (tmp_path / "spec_jax/tree.py").write_text("from spec_jax import noise")
    assert faults(tmp_path) == []
    (tmp_path / "spec_jax/noise.py").write_text("from spec_jax import tree")
    assert len(faults(tmp_path)) == 2
