"""Every published system as a config: it builds, and its text is plain decoding's (or has the target's law)."""

import functools
import importlib
import inspect

import pytest

from spec_jax import configs
from spec_jax.engine.decoder import Decoder
from spec_jax.models.toy import AuditTarget, audit_table
from spec_jax.sampling.settings import Sampling
from spec_jax.verify.match import match

V = 8
RELAXED = {name for name in configs.names() if "relaxed" in name}
DRAFT_MODEL = {
    name
    for name in configs.names()
    if "draft_model" in inspect.signature(importlib.import_module(f"spec_jax.configs.{name}").engine).parameters
}
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [4]]


@functools.cache
def decoder(name):
    target = AuditTarget(V)
    draft = target if name in DRAFT_MODEL else None
    engine = configs.build(name, target, 80, draft_model=draft)
    return Decoder(engine, audit_table(V), 0.8 * audit_table(V) if draft else None, batch=2)


@functools.cache
def results(name, temperature):
    got = decoder(name).generate(PROMPTS, 60, key=3, sampling=Sampling(temperature=temperature))
    return decoder(name).engine, got


@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("name", configs.names())
def test_text_is_plain_decodings(name, temperature):
    engine, got = results(name, temperature)
    want = results("plain", temperature)[1]
    for ours, plain in zip(got, want, strict=True):
        assert len(ours.tokens) == 60
        if engine.rule is match or temperature == 0 and name not in RELAXED:
            assert ours.tokens == plain.tokens
    if name != "plain":
        assert sum(r.counters["accepted"] for r in got) > 0


@pytest.mark.parametrize("name", configs.names())
def test_a_config_says_its_paper_and_fits_one_screen(name):
    module = __import__(f"spec_jax.configs.{name}", fromlist=["engine"])
    with open(module.__file__) as file:
        lines = file.read().splitlines()
    assert len(lines) <= 45 and module.engine.__doc__
    assert name == "plain" or "arXiv" in module.__doc__


def test_unknown_names_and_draft_models_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="config: got 'sufix_decoding', takes one of"):
        configs.build("sufix_decoding", AuditTarget(V), 80)
    with pytest.raises(ValueError, match="speculative_sampling needs one"):
        configs.build("speculative_sampling", AuditTarget(V), 80)
    with pytest.raises(ValueError, match="plain uses none, got one"):
        configs.build("plain", AuditTarget(V), 80, draft_model=AuditTarget(V))
