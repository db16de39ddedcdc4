"""Weights that go straight to the devices that hold them, and from one mesh to another."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from spec_jax.models import lazy
from spec_jax.models.checkpoint import CheckpointError, LazyTensor, required_tensors
from spec_jax.models.config import LlamaConfig
from spec_jax.models.load import abstract_params, load_target
from spec_jax.models.orbax_weights import WEIGHTS, save_orbax
from spec_jax.models.qwen_config import QwenConfig
from tests.models import qwen_kit as kit
from tests.models.test_qwen import MTP, per_expert, write
from tests.processes import environment

ROOT = Path(__file__).parents[2]
BLOCK = 4 * 32 * 16  # the largest row of a first axis: an expert's half
LLAMA_FIELDS = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
LLAMA = LlamaConfig.from_hf(LLAMA_FIELDS)
HYBRID = dataclasses.replace(MTP, vocab_size=96)
MOE_FIELDS = {
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MOE = QwenConfig.from_hf(MOE_FIELDS)


def run(devices, module, *args):
    env = environment(devices, "--xla_backend_optimization_level=0")
    command = [sys.executable, "-W", "error", "-m", module, *map(str, args)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of a Llama, a Qwen3-MoE and a Qwen3-Next with its MTP head, random."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("llama", "moe", "apart", "packed"):
        (folder / name).mkdir()
    rng = np.random.default_rng(0)
    tensors = {n: rng.standard_normal(shape, np.float32) for n, shape in required_tensors(LLAMA).items()}
    save_file(tensors, folder / "llama" / "model.safetensors")
    (folder / "llama" / "config.json").write_text(json.dumps(LLAMA_FIELDS))
    save_file(per_expert(kit.random_tensors(MOE)), folder / "moe" / "model.safetensors")
    (folder / "moe" / "config.json").write_text(json.dumps(MOE_FIELDS))
    write(folder / "apart", HYBRID, per_expert(kit.random_tensors(HYBRID)))
    write(folder / "packed", HYBRID, kit.random_tensors(HYBRID))
    return folder


@pytest.fixture(scope="module")
def saved(models, tmp_path_factory):
    """What eight devices streamed, and where they saved it."""
    folder = tmp_path_factory.mktemp("saved")
    return run(8, "tests.models.streamed", models, folder), folder


@pytest.fixture(scope="module")
def again(models, saved, tmp_path_factory):
    """What four devices restored, and where they saved it."""
    folder = tmp_path_factory.mktemp("again")
    return run(4, "tests.models.restored", models, saved[1], folder), folder


def test_streamed_weights_are_those_loaded_whole_and_split(saved):
    assert len(saved[0]) == 5
    for case, found in saved[0].items():
        assert found["equal"] and found["on_mesh"], case


def test_each_part_is_read_once_and_no_more_is_held(saved):
    for case, found in saved[0].items():
        assert found["read"] == found["needed"], case
        assert found["largest_held"] == found["largest_shard"] < found["largest_array"], case
        assert found["largest_read"] <= BLOCK, case


def test_saved_weights_go_from_eight_devices_to_four_to_one(models, saved, again):
    assert len(again[0]) == 2 and all(again[0].values()), again[0]
    for path in again[1].iterdir():
        name, stacked = path.name.rsplit("-", 1)
        got, want = load_target(path), load_target(models / name, stacked=stacked == "True")
        assert got.target == want.target and jax.tree.structure(got.params) == jax.tree.structure(want.params)
        for a, b in zip(jax.tree.leaves(got.params), jax.tree.leaves(want.params), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


def test_a_missing_or_foreign_part_of_saved_weights_is_named(models, saved, tmp_path):
    path = saved[1] / "packed-True"
    with pytest.raises(ValueError, match="stacked: got False, takes True or None: .* has its layers stacked"):
        load_target(path, stacked=False)
    shutil.copytree(path, tmp_path / "other")
    fields = json.loads((path / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(fields | {"moe_intermediate_size": 24}))
    with pytest.raises(
        CheckpointError, match=r"is of another model: .*mlp.down \[1, 4, 16, 32\], not \[1, 4, 24, 32\]"
    ):
        load_target(tmp_path / "other")


def test_damaged_weights_are_refused(saved, tmp_path):
    shutil.copytree(saved[1] / "packed-True", tmp_path / "cut")
    for file in (tmp_path / "cut" / WEIGHTS).glob("**/d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    # In a process of its own: threads of orbax's storage go on after the first error, and complain at any later time.
    script = f"from spec_jax.models.load import load_target; load_target({str(tmp_path / 'cut')!r})"
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(r"CheckpointError: \S+/cut/params: (damaged|no whole orbax checkpoint)", done.stderr), done.stderr
    (tmp_path / "cut" / WEIGHTS / "_METADATA").unlink()
    with pytest.raises(CheckpointError, match="no whole orbax checkpoint"):
        load_target(tmp_path / "cut")


def test_what_can_not_be_saved_is_refused(models, saved, tmp_path):
    params = load_target(models / "llama").params
    with pytest.raises(FileNotFoundError, match="source: .* has no config.json"):
        save_orbax(tmp_path, params, tmp_path)
    with pytest.raises(ValueError, match="directory: .* holds weights already"):
        save_orbax(saved[1] / "llama-False", params, models / "llama")


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", ["llama", "moe", "packed"])
def test_abstract_parameters_are_those_of_a_loaded_model(name, stacked, models):
    model = load_target(models / name, jnp.bfloat16, stacked=stacked, transposed=False)
    want = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model.params)
    assert abstract_params(model.target.config, jnp.bfloat16, stacked) == want


def test_every_box_of_a_lazy_array_is_that_of_the_array():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((12, 1, 5), np.float32) for _ in range(2))
    rows = rng.permutation(12)[:9]
    x = [lazy.flat(lazy.tensor(y)) for y in (a, b)]
    x = lazy.stack([lazy.transpose(lazy.plus_one(lazy.pick(y, rows))) for y in x])
    x = lazy.halves(lazy.transpose(x, 2, 0, 1), 0)[1]
    want = np.stack([(1 + y[rows, 0]).T for y in (a, b)]).transpose(2, 0, 1)[4:8]
    assert x.shape == want.shape
    np.testing.assert_array_equal(x.read(), want)
    for _ in range(40):
        box = tuple(slice(*sorted(rng.integers(0, n + 1, 2).tolist())) for n in want.shape)
        np.testing.assert_array_equal(x.read(box), want[box])


def test_a_tensor_that_is_read_whole_is_read_once(monkeypatch):
    monkeypatch.setattr(lazy, "BLOCK_BYTES", 8)
    content, reads = np.arange(24, dtype=np.float32).reshape(6, 4), []
    whole = LazyTensor((6, 4), content.dtype, lambda: reads.append("all") or content)
    parts = LazyTensor((6, 4), content.dtype, lambda: content, lambda box: reads.append("part") or content[box])
    for tensor in (whole, parts):
        np.testing.assert_array_equal(lazy.tensor(tensor).read((slice(1, 4), slice(0, 2))), content[1:4, :2])
    assert reads == ["all", "part", "part", "part"]
