"""The names that the docs give are there."""

import importlib
import re
from pathlib import Path

import pytest

from spec_jax import configs

ROOT = Path(__file__).parents[1]
METHODS = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
TEXTS = {"README": (ROOT / "README.md").read_text(encoding="utf-8"), "methods": METHODS}


def resolve(name: str) -> object:
    """What a dotted name stands for."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for part in parts[n:]:
            found = getattr(found, part)
        return found
    raise LookupError(name)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(spec_jax\.[\w.]+)`", METHODS))))
def test_names_resolve(name):
    assert resolve(name) is not None


def test_a_name_that_is_not_there_is_found_out():
    with pytest.raises(AttributeError):
        resolve("spec_jax.verify.match.no_such_rule")


def test_configs_exist_and_every_one_is_listed():
    rows = [row for _, row in re.findall(r"(configs?) ((?:`\w+`(?:, )?)+)", METHODS)]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == set(configs.names()) - {"plain"}


@pytest.mark.parametrize("text", TEXTS)
def test_paths_exist(text):
    for path in re.findall(r"`((?:spec_jax|scripts|tests|configs|docs|pallas_kernels)/[\w./]*)`", TEXTS[text]):
        assert (ROOT / path).exists(), path


def test_bench_subcommands_exist():
    source = (ROOT / "scripts" / "bench.py").read_text(encoding="utf-8")
    for text in TEXTS.values():
        for command in re.findall(r"bench\.py (\w+)", text):
            assert f'"{command}": {command}' in source, command
