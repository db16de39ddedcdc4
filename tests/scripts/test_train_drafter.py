"""train_drafter.py from a recipe to weights, on a toy target that is read from a directory."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("grain", reason="reads the batches")
pytest.importorskip("tensorboardX", reason="writes the events")

from safetensors.numpy import save_file  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402

from spec_jax.drafters.load import load_drafter  # noqa: E402
from spec_jax.engine.decoder import Decoder  # noqa: E402
from spec_jax.engine.engine import Engine  # noqa: E402
from spec_jax.models.checkpoint import required_tensors  # noqa: E402
from spec_jax.models.config import LlamaConfig  # noqa: E402
from spec_jax.models.load import load_target  # noqa: E402
from spec_jax.train import logs, vocabulary  # noqa: E402
from spec_jax.train.block import KEPT  # noqa: E402
from spec_jax.train.recipe import Recipe  # noqa: E402
from spec_jax.train.store import Store  # noqa: E402
from tests.processes import environment, printed  # noqa: E402
from tests.scripts.recipe_mistakes import MISTAKES, RECIPE  # noqa: E402

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "train_drafter.py"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A Llama over bytes, in a directory."""
    folder = tmp_path_factory.mktemp("target")
    c = LlamaConfig(
        vocab_size=257,
        hidden_size=16,
        intermediate_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=64,
    )
    names = {"num_hidden_layers": c.num_layers, "num_attention_heads": c.num_heads}
    same = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings")
    fields = {"model_type": "llama", "num_key_value_heads": c.num_kv_heads, "rms_norm_eps": 1e-6, "eos_token_id": 0}
    fields |= names | {name: getattr(c, name) for name in same}
    (folder / "config.json").write_text(json.dumps(fields))
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in required_tensors(c).items()}
    save_file(tensors, folder / "model.safetensors")
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(["<eos>", *BYTES])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder


@pytest.fixture
def script(monkeypatch, capsys, target):
    def run(*args, status=0):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--target", str(target), *map(str, args)])
        monkeypatch.syspath_prepend(str(SCRIPT.parent))
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        out = capsys.readouterr()
        assert ended.value.code == status, out.err
        return out.out + out.err

    return run


def test_from_a_recipe_to_weights(tmp_path, script, target):
    recipe, run = tmp_path / "toy.toml", tmp_path / "run"
    recipe.write_text(RECIPE)
    out = script("--config", recipe, "--run", run, "--texts-only")
    assert "12 texts" in out and not (run / "checkpoints").exists()
    texts = Store.existing(run / "texts").read()
    out = script("--config", recipe, "--run", run)
    assert [t.tokens.tolist() for t in Store.existing(run / "texts").read()] == [t.tokens.tolist() for t in texts]
    rows = logs.read(run)
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert ["acceptance_length" in row for row in rows] == [False, False, True] * 2
    assert "acceptance_length" in out and {"loss", "confidence_loss", "right_1"} <= rows[0].keys()
    about = json.loads((run / "out" / "training.json").read_text())
    assert about["steps"] == 6 and about["kind"] == "block" and "acceptance_length" in about["reached"]
    assert "12 answers" in (run / "out" / "README.md").read_text()
    model = load_target(str(target))
    loaded = load_drafter(run / "out", model)
    temperatures = np.asarray(loaded.params.head.temperature)  # greedy answers of noise are hardly ever foreseen
    np.testing.assert_allclose(temperatures, about["temperatures"], rtol=1e-3)
    assert temperatures.shape == (4,) and (temperatures != 1).any()
    engine = Engine(loaded.target, max_len=32, drafter=loaded.drafter, prefill_chunk=8)
    [result] = Decoder(engine, model.params, loaded.params, batch=1).generate([(1, 2, 3)], 8)
    plain = Decoder(Engine(model.target, max_len=32, prefill_chunk=8), model.params, batch=1)
    assert result.tokens == plain.generate([(1, 2, 3)], 8)[0].tokens
    for name in ("loss.png", "acceptance.png"):
        assert (run / "out" / name).read_bytes()[:4] == b"\x89PNG"
    assert "holds a run" in script("--config", recipe, "--run", run, status=2)
    script("--config", recipe, "--run", run, "--resume")
    recipe.write_text(RECIPE.replace("anchors = 4", "anchors = 5"))
    assert "training: got" in script("--config", recipe, "--run", run, "--resume", status=2)
    recipe.write_text(RECIPE.replace("passages = 12", "passages = 13"))
    assert "passages: got 13, takes 12" in script("--config", recipe, "--run", run, "--resume", status=2)


@pytest.mark.slow
def test_trees_are_compared_with_earlier_weights(tmp_path, script, target):
    """GTO from a recipe: a drafter goes on from weights in a folder, beside those of a frozen one in another."""
    recipe, model = tmp_path / "toy.toml", load_target(str(target))
    grown = RECIPE.replace("steps = 6", "steps = 2").replace("measure_every = 3", "measure_every = 0")
    grown = grown.replace("confidence = 1.0", "confidence = 1.0\ntree = 1.0\ntree_nodes = 17\ntree_children = 16")
    grown = grown.replace("batch = 4\nlength", 'begin = "a"\nreference = "b"\nbatch = 4\nlength')
    recipe.write_text(RECIPE)
    script("--config", recipe, "--run", tmp_path / "run", "--texts", tmp_path / "texts", "--texts-only")
    recipe.write_text(grown)
    written = [text.tokens[text.mask] for text in Store.existing(tmp_path / "texts").read()]
    kept = vocabulary.most_frequent(vocabulary.count(written, 257), 64, (0,))
    forward, shared = Recipe.load(recipe).drafter.forward(model.target.config), {KEPT: jnp.asarray(kept)}
    for seed, name in enumerate("ab"):
        key = jax.random.key(seed)
        made = forward.init(key, model.params, shared[KEPT])
        made = jax.tree.map(lambda x: x + seed * jax.random.normal(key, x.shape), made)  # noqa: B023
        forward.save(tmp_path / name, forward.as_drafter(made, model.params, shared), "toy")
    script("--config", recipe, "--run", tmp_path / "run", "--texts", tmp_path / "texts")
    rows = logs.read(tmp_path / "run")
    assert rows[0]["tree_loss"] != 0 and rows[0]["tree_reward"] > 0
    begun, other, after = (load_drafter(tmp_path / at, model).params for at in ("a", "b", "run/out"))
    np.testing.assert_array_equal(after.kept, begun.kept)
    apart = lambda x: np.abs(np.asarray(x.network.fc.kernel - after.network.fc.kernel)).mean()  # noqa: E731
    assert 0 < apart(begun) < 0.1 * apart(other)
    recipe.write_text(grown.replace("block_size = 4", "block_size = 5"))
    out = script("--config", recipe, "--run", tmp_path / "other", "--texts", tmp_path / "texts", status=2)
    assert "begin: " in out and "has a network with block_size 4" in out


def test_mistakes_are_one_line(tmp_path, script):
    assert "config: " in script("--config", tmp_path / "none.toml", "--run", tmp_path, status=2)
    (tmp_path / "bad.toml").write_text("[drafter]\nlayer = 1\n")
    assert "drafter: got ['layer']" in script("--config", tmp_path / "bad.toml", "--run", tmp_path, status=2)


@pytest.fixture(scope="module")
def told(target, tmp_path_factory):
    """What the script said of every mistake, its status, and what it left, from a process without checks of types."""
    folder = tmp_path_factory.mktemp("mistakes")
    command = [sys.executable, "-m", "tests.scripts.recipe_mistakes", str(folder), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=600)
    assert done.returncode == 0, done.stderr
    return printed(done.stdout)


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=[message[:40] for _, message in MISTAKES])
def test_a_mistake_is_found_before_the_texts(told, number):
    """What a recipe says wrong, for a target of two layers without an MTP head, is told before anything is written."""
    found, (_, message) = told[number], MISTAKES[number]
    assert message in found["said"] and found["said"].startswith("error: ")
    assert found["status"] == 2 and found["made"] == ["toy.toml"]
