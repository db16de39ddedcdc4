"""What drafters read of a target: against the target's own first and last steps, for every family."""

import dataclasses
import importlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.drafters.block import network
from spec_jax.drafters.block.ends import ends_of
from spec_jax.models import llama, qwen_tensors
from spec_jax.models.llama import Llama
from spec_jax.models.mtp import forward_text
from spec_jax.models.qwen import Qwen
from tests.drafters.block import kit
from tests.models import qwen_kit

B, T = 2, 5


def tied():
    config = dataclasses.replace(kit.LLAMA, tie_word_embeddings=True)
    return Llama(config), llama.from_tensors(config, kit.tensors(kit.LLAMA))


def qwen(config):
    return Qwen(config), qwen_tensors.from_tensors(config, qwen_kit.random_tensors(config))


FAMILIES = {
    "llama": kit.llama,
    "tied": tied,
    "hybrid": lambda: qwen(qwen_kit.HYBRID),
    "gemma": lambda: qwen(qwen_kit.gemma()),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_ends_are_the_targets(name):
    target, params = FAMILIES[name]()
    c, ends = target.config, ends_of(params)
    tokens = jax.random.randint(jax.random.key(1), (B, T), 0, c.vocab_size)
    read = kit.jit(lambda t: dataclasses.replace(target, taps=(0,)).prefill(params, state, t, length)[0])
    state, length = target.init_state(params, B, T), jnp.full(B, T)
    scale = c.hidden_size**0.5 if name == "gemma" else 1.0
    np.testing.assert_allclose(ends.embed(tokens) * scale, read(tokens)[:, :, 0], rtol=1e-6)
    hidden = jax.random.normal(jax.random.key(2), (B, T, c.hidden_size))
    want = target.logits(params, hidden)
    normed = ends.final(hidden, c.rms_norm_eps)
    np.testing.assert_allclose(ends.logits(normed), want, atol=1e-5)
    some = jnp.take_along_axis(want, jnp.broadcast_to(tokens[:, None], (B, T, T)), axis=2)
    np.testing.assert_allclose(ends.some_logits(normed, tokens), some, atol=1e-5)
    np.testing.assert_allclose(ends.columns(tokens[0])(normed[0]), want[0][:, tokens[0]], atol=1e-5)


def test_an_mtp_head_reads_embeddings_as_its_model_does():
    """It is a part of the model: scaled embeddings are those of a table that holds them scaled."""
    config = dataclasses.replace(qwen_kit.HYBRID, mtp=True)
    scaled = dataclasses.replace(config, scaled_embeddings=True)
    params = qwen(config)[1]
    table = dataclasses.replace(params, embedding=params.embedding * config.hidden_size**0.5)
    tokens = jax.random.randint(jax.random.key(1), (B, T), 0, config.vocab_size)
    context = jax.random.normal(jax.random.key(2), (B, T, config.hidden_size))
    # an eps that counts, since the head norms what it reads
    said = lambda c, p: forward_text(dataclasses.replace(c, rms_norm_eps=0.1), p, context, tokens)[0].logits  # noqa: E731
    got, want = said(scaled, params), said(config, table)
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert np.abs(got - said(config, params)).max() > 0.01


@pytest.mark.parametrize("scale", [1.0, 32**0.5])
def test_a_gemmas_drafter_reads_what_dflashs_does(scale):
    dflash = pytest.importorskip("dflash.model", reason="the PyPI package dflash is not installed")
    torch = importlib.import_module("torch")
    model = qwen_kit.theirs("Gemma3")
    target, params = qwen_kit.ours(model)
    c = kit.config(vocab_size=qwen_kit.VOCAB, hidden_size=32, embedding_scale=scale)
    got = network.slot_inputs(c, ends_of(params), jnp.array([3, 50]))
    ids = torch.full((2, c.block_size), c.mask_token)
    ids[:, 0] = torch.tensor([3, 50])
    with torch.no_grad():
        want = dflash._raw_input_embeddings(model, ids, scale)
        module = model.get_input_embeddings()(ids)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-6)
    assert np.allclose(got, module.numpy(), rtol=1e-5) == (scale > 1)
    assert target.config.scaled_embeddings


def test_a_gemmas_drafter_reads_what_speculators_does(tmp_path):
    package = pytest.importorskip("speculators.model", reason="the PyPI package speculators is not installed")
    torch = importlib.import_module("torch")
    model = qwen_kit.theirs("Gemma3")
    model.save_pretrained(tmp_path)

    class Reader(package.DraftVocabMixin, torch.nn.Module):
        def __init__(self):
            super().__init__()
            layer = SimpleNamespace(vocab_size=qwen_kit.VOCAB, hidden_size=32)
            verifier = SimpleNamespace(verifier=SimpleNamespace(name_or_path=str(tmp_path)))
            self.config = SimpleNamespace(speculators_config=verifier)
            self._init_vocab(SimpleNamespace(transformer_layer_config=layer, draft_vocab_size=qwen_kit.VOCAB))
            self.load_verifier_weights()

    ids = np.array([[3, 50, 7]])
    with torch.no_grad():
        want = Reader().embed_tokens(torch.tensor(ids))
    np.testing.assert_allclose(ends_of(qwen_kit.ours(model)[1]).embed(jnp.asarray(ids)), want.numpy(), rtol=1e-6)
