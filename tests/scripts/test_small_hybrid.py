"""The weights in the repository are those of their card."""

import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

from scripts.hybrid import corpus, export, shape
from spec_jax.models import mtp, qwen_text
from spec_jax.models.load import load_target

DIRECTORY = Path(__file__).parents[2] / "spec_jax" / "models" / "small_hybrid"
CARD = (DIRECTORY / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def model():
    return load_target(DIRECTORY)


def test_it_is_a_hybrid_of_every_kind_of_part_and_small(model):
    config = model.target.config
    assert config.layer_types.count("linear_attention") == 3 * config.layer_types.count("full_attention") > 0
    assert all(config.sparse) and config.shared_expert_intermediate_size and config.mtp
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) < 25e6
    assert model.tokenizer.vocab_size == config.vocab_size and len(model.eos_token_ids) == 1


def test_it_reads_held_out_code_as_its_card_says(model):
    """On the start of some held-out files; this Python may have other versions of them, so the bound is loose."""
    said = float(re.search(r"^\| nats per token \| ([\d.]+) \|", CARD, re.M)[1])
    agreed = float(re.search(r"^\| MTP step 1: .*, ([\d.]+) % \|", CARD, re.M)[1]) / 100
    held_out = corpus.split(corpus.stdlib_sources())[1]
    assert all(source.name in CARD for source in held_out if source.name in ("operator.py", "runpy.py"))
    texts = [model.tokenizer.encode(source.text) for source in held_out]
    tokens = jnp.asarray([ids[:256] for ids in texts if len(ids) >= 256][:8])

    @jax.jit
    def read(params, tokens):
        config = model.target.config
        out = qwen_text.forward_text(config, params, tokens)
        context = qwen_text.final_norm(config, params, out.hidden)
        further, _ = mtp.forward_text(config, params, context[:, :-1], tokens[:, 1:])
        law = jax.nn.log_softmax(out.logits[:, :-1])
        same = further.logits.argmax(-1) == out.logits[:, 1:].argmax(-1)
        return -jnp.take_along_axis(law, tokens[:, 1:, None], -1).mean(), same.mean()

    loss, agrees = read(model.params, tokens)
    assert abs(loss - said) < 0.8 < 0.6 * math.log(model.target.config.vocab_size)
    assert abs(agrees - agreed) < 0.15


def test_training_on_from_it_writes_the_same_files(model, tmp_path):
    """Exported again, nothing trained: every file that a loader reads, and the logits."""
    config = model.target.config
    assert config == shape.config()
    tokenizer = tokenizers.Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
    export.save(tmp_path, model.params, config, tokenizer, np.float16)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((DIRECTORY / name).read_text()), name
    old, new = (load_file(folder / "model.safetensors") for folder in (DIRECTORY, tmp_path))
    assert {n: (x.shape, x.dtype) for n, x in new.items()} == {n: (x.shape, x.dtype) for n, x in old.items()}
    for name, x in old.items():
        np.testing.assert_allclose(new[name].astype(np.float32), x.astype(np.float32), rtol=0, atol=1e-7, err_msg=name)
    again = load_target(tmp_path)
    assert again.target == model.target and again.eos_token_ids == model.eos_token_ids
    tokens = jnp.asarray([model.tokenizer.encode("import os\n\n\ndef main(path: str) -> None:\n    ")])
    read = jax.jit(lambda params: qwen_text.forward_text(config, params, tokens).logits)
    np.testing.assert_allclose(read(again.params), read(model.params), atol=1e-4)
