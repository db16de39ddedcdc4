"""Drafters written in other formats, through the command line."""

import dataclasses
import importlib
import json
import runpy
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from spec_jax.drafters import (
    early_exit,
    medusa_files,
    mlp_speculator_files,
    mtp,
    mtp_files,
    parallel_files,
    recurrent_files,
)
from spec_jax.drafters.block import native
from spec_jax.drafters.block.heads.head import Plain
from spec_jax.drafters.block.heads.markov import Markov
from spec_jax.drafters.eagle import weights
from spec_jax.drafters.early_exit import EarlyExitConfig
from spec_jax.drafters.files import read_directory, write_directory
from spec_jax.drafters.load import load_drafter
from spec_jax.drafters.parallel_model import ParallelConfig
from spec_jax.drafters.recurrent import RecurrentConfig
from spec_jax.models import qwen_tensors
from spec_jax.models.linear import Dense
from spec_jax.models.load import load_target
from tests.drafters.block import kit
from tests.drafters.eagle import kit as heads
from tests.drafters.hybrid import hybrid

SCRIPT = Path(__file__).parents[2] / "scripts" / "convert.py"
TARGET = types.SimpleNamespace(target=kit.llama()[0], params=kit.llama()[1])
BLOCK = {
    "dflash": (Plain(), {}),
    "dspark": (Markov(6), {"slots": "shifted"}),
    "dspark small": (Markov(6, "gated", None), {"slots": "shifted", "draft_vocab_size": 9}),
    "domino": (kit.HEADS["domino"], {"slots": "shifted"}),
    "dflare": (Plain(), {"per_layer_features": True}),
}

OWN = {
    "redrafter": RecurrentConfig(kit.V, kit.H, 1, final_norm_eps=heads.EPS),
    "pard": ParallelConfig(dataclasses.replace(kit.LLAMA, num_layers=1), kit.MASK, depth=3),
    "kangaroo": EarlyExitConfig(kit.LLAMA, layers=1, adapter=2),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The tiny Llama as a directory."""
    folder, c = tmp_path_factory.mktemp("target"), kit.LLAMA
    same = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rms_norm_eps", "max_position_embeddings")
    fields = {name: getattr(c, name) for name in same} | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    fields |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({n: np.ascontiguousarray(x, np.float32) for n, x in kit.tensors().items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def convert(monkeypatch, capsys, target):
    def run(*args, status=0):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--target", str(target), *map(str, args)])
        monkeypatch.syspath_prepend(str(SCRIPT.parent))
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        out, err = capsys.readouterr()
        assert ended.value.code == status, err
        return out or err

    return run


def ours(folder, name):
    """A toy drafter in our own format, or the one that its kind has."""
    if name in BLOCK:
        head, changes = BLOCK[name]
        c = kit.config(**changes)
        params = kit.params(c, head)
        if isinstance(head, Markov) and head.confidence:
            own = dataclasses.replace(params.head, temperature=jnp.ones(c.depth))
            params = dataclasses.replace(params, head=own)
        if c.draft_vocab_size:
            lm_head = Dense(jnp.asarray(np.random.default_rng(9).normal(0, 1, (kit.H, 9)), jnp.float32))
            params = dataclasses.replace(params, lm_head=lm_head, kept=jnp.arange(1, 18, 2, dtype=jnp.int32))
        native.save_native(folder, c, head, params)
    elif name == "redrafter":
        recurrent_files.save(folder, OWN[name], heads.params(OWN[name]), "x", steps=4)
    elif name == "pard":
        parallel_files.save(folder, OWN[name], heads.params(OWN[name]), "x")
    elif name == "kangaroo":
        early_exit.save(folder, OWN[name], early_exit.of(heads.params(OWN[name])), "x")
    elif heads.is_eagle(config := heads.CONFIGS[name]):
        weights.save(folder, config, heads.params(config), {"name_or_path": "x", "architectures": []}, steps=4)
    else:
        files = mlp_speculator_files if name == "mlp_speculator" else medusa_files
        files.save(folder, config, heads.params(config), "x")
    return folder


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("name", "to", "says"),
    [
        ("dflash", "speculators", {"speculators_model_type": "dflash"}),
        ("dspark small", "speculators", {"speculators_model_type": "dspark"}),
        ("dflash", "published", {"architectures": ["DFlashDraftModel"]}),
        ("dspark", "published", {"architectures": ["Qwen3DSparkModel"]}),
        ("domino", "published", {"architectures": ["DFlashDraftModel"]}),
        ("dflare", "native", {"target": "some/model"}),
        ("eagle3", "speculators", {"speculators_model_type": "eagle3"}),
        ("p_eagle", "speculators", {"speculators_model_type": "peagle"}),
        ("eagle1", "published", {"architectures": ["LlamaForCausalLMEagle"]}),
        ("redrafter", "native", {"target": "some/model", "steps": 4}),
        ("pard", "native", {"format": "spec_jax.parallel"}),
        ("kangaroo", "native", {"format": "spec_jax.early_exit"}),
        ("medusa", "published", {"base_model_name_or_path": "some/model"}),
        ("hydra++", "published", {"base_model_name_or_path": "some/model", "hydra_head_arch": "prefix-mlp"}),
        ("mlp_speculator", "published", {"base_model_name_or_path": "some/model", "n_predict": 3}),
    ],
)
def test_a_drafter_is_the_same_in_another_format(name, to, says, convert, tmp_path):
    source, out = ours(tmp_path / "ours", name), tmp_path / "out"
    printed = json.loads(convert(source, "--to", to, "--out", out, "--verifier", "some/model").splitlines()[-1])
    assert printed["format"] == to and printed["bytes"] == (out / "model.safetensors").stat().st_size
    fields, _ = read_directory(out)
    assert says.items() <= fields.items()
    if to == "speculators":
        about = fields["speculators_config"]["verifier"]
        assert about == {"name_or_path": "some/model", "architectures": ["LlamaForCausalLM"]}
    before, after = load_drafter(source, TARGET), load_drafter(out, TARGET)
    assert type(before.drafter) is type(after.drafter) and before.drafter.depth == after.drafter.depth
    same(before.params, after.params)
    again = convert(source, "--to", to, "--out", out, status=2)
    assert again.startswith(f"error: --out: got {out}, which is there already")


@pytest.mark.parametrize(
    ("name", "to", "message"),
    [
        ("domino", "speculators", "head is 'Domino'; taken: Plain, Selector, Markov or Jacobi"),
        ("dflare", "speculators", "per-layer features"),
        ("dspark small", "published", "draft_vocab_size is 9"),
        ("eagle1", "speculators", "--to: got 'speculators' for an EAGLE-1 head, takes 'published'"),
        ("eagle3", "native", "--to: got 'native' for an EAGLE-3 or P-EAGLE head, takes 'speculators'"),
        ("pard", "published", "--to: got 'published' for a PARD model, takes 'native'"),
        ("mlp_speculator", "native", "--to: got 'native' for an MLP speculator, takes 'published'"),
        ("hydra", "speculators", "--to: got 'speculators' for Medusa's or Hydra's heads, takes 'published'"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(name, to, message, convert, tmp_path):
    said = convert(ours(tmp_path / "ours", name), "--to", to, "--out", tmp_path / "out", status=2)
    assert said.startswith("error: ") and message in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_mtp_head_comes_out_of_its_target_and_back(convert, tmp_path):
    whole, (made, params) = tmp_path / "whole", hybrid()
    write_directory(whole, made.config.to_hf(), qwen_tensors.to_tensors(made.config, params))
    model, source = load_target(whole), whole
    for to in ("speculators", "native"):
        convert(source, "--target", whole, "--to", to, "--out", tmp_path / to)
        source = tmp_path / to
        loaded = load_drafter(source, model)
        same(loaded.params, mtp.params(model.params))
        assert loaded.drafter.depth == mtp_files.STEPS
    said = convert(source, "--target", whole, "--to", "published", "--out", tmp_path / "out", status=2)
    assert "published inside its target, takes 'native' or 'speculators'" in said and said.count("\n") == 1


def test_mistakes_are_one_line(convert, tmp_path):
    assert "no such directory" in convert(tmp_path / "none", "--to", "native", "--out", tmp_path / "out", status=2)
    (tmp_path / "config.json").write_text("{}")
    said = convert(tmp_path, "--to", "native", "--out", tmp_path / "out", status=2)
    assert said.startswith("error: ") and said.count("\n") == 1


def test_numbers_of_half_the_bytes(convert, tmp_path):
    source = ours(tmp_path / "ours", "dflash")
    convert(source, "--to", "speculators", "--out", tmp_path / "out", "--dtype", "bfloat16")
    before, after = read_directory(source)[1], read_directory(tmp_path / "out")[1]
    assert {x.dtype.name for x in after.values()} == {"bfloat16"}
    np.testing.assert_array_equal(after["norm.weight"], before["network.norm"].astype(jnp.bfloat16))


@pytest.mark.parametrize("name", ["dflash", "dspark small", "eagle3"])
def test_speculators_reads_it(name, convert, tmp_path):
    package = pytest.importorskip("speculators", reason="the PyPI package speculators is not installed")
    torch = pytest.importorskip("torch", reason="speculators is written in torch")
    source, out = ours(tmp_path / "ours", name), tmp_path / "out"
    convert(source, "--to", "speculators", "--out", out)
    config = package.SpeculatorModelConfig.from_pretrained(out)
    kind = name.split()[0]
    assert config.speculators_model_type == kind and config.speculators_config.algorithm == kind
    config.transformer_layer_config._attn_implementation = "eager"
    model = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel", "eagle3": "Eagle3DraftModel"}[kind]
    made = getattr(importlib.import_module(f"speculators.models.{kind}"), model)(config)
    tensors = read_directory(out)[1]
    found = made.load_state_dict({n: torch.tensor(np.array(x)) for n, x in tensors.items()}, strict=False)
    targets = {"embed_tokens.weight", "lm_head.weight", "verifier_norm.weight", "verifier_lm_head.weight"}
    targets |= {"t2d", "d2t"} if config.draft_vocab_size == kit.V else set()
    assert not found.unexpected_keys and set(found.missing_keys) <= targets
