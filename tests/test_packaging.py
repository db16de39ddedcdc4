"""The wheel holds the whole package, and it imports away from the repository."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "import sys, setuptools.build_meta as b; b.build_wheel(sys.argv[1])"
IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        print(importlib.import_module(name).__file__)
    except ModuleNotFoundError as missing:
        if missing.name.split(".")[0] in ("spec_jax", "pallas_kernels", "configs", "scripts"):
            raise
"""


def _files(folder):
    return {path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__"}


@pytest.mark.slow
def test_the_wheel_is_whole_and_imports(tmp_path):
    pytest.importorskip("setuptools", minversion="77", reason="builds the wheel")
    source, unpacked = tmp_path / "source", tmp_path / "unpacked"
    other = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, source, symlinks=True, ignore=other)
    subprocess.run([sys.executable, "-c", BUILD, str(tmp_path)], cwd=source, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)

    ours = {
        Path("spec_jax" if package == "configs" else "", path.relative_to(ROOT))
        for package in ("spec_jax", "pallas_kernels", "configs")
        for path in _files(ROOT / package)
    }
    packed = {path.relative_to(unpacked) for path in _files(unpacked)}
    assert {path for path in packed if ".dist-info" not in path.parts[0]} == ours

    names = sorted(".".join(path.with_suffix("").parts) for path in ours if path.suffix == ".py")
    environment = os.environ | {"PYTHONPATH": str(unpacked), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", IMPORT, *names], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    imported = {Path(file).relative_to(unpacked) for file in run.stdout.splitlines()}
    assert Path("spec_jax/tree.py") in imported and Path("spec_jax/configs/__init__.py") in imported


def test_configs_is_importable_as_part_of_the_package():
    import spec_jax.configs

    assert Path(spec_jax.configs.__path__[0]).resolve() == ROOT / "configs"
