"""The weights in the repository are those of their card."""

import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from scripts.hybrid import corpus
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
