"""Every published system as a config: it builds, and its text is plain decoding's (or has the target's law)."""

import functools

import pytest

from spec_jax import configs
from spec_jax.control.cost import CostModel
from spec_jax.engine.decoder import Decoder
from spec_jax.models.toy import AuditTarget
from spec_jax.sampling.settings import Sampling
from spec_jax.verify.match import match
from tests.configs.targets import (
    DRAFT_MODEL,
    NETWORK,
    OWN_HEAD,
    VIEWS,
    V,
    build,
    model_of,
    module,
    names,
    narrow,
    own_params,
    weak,
)
from tests.drafters.block.kit import llama

RELAXED = {name for name in configs.names() if "relaxed" in name}
ALIKE = {
    *("block_verification", "svip"),  # speculative_sampling
    *("canonical_decomposition", "resispec", "specinfer"),  # spectr
    "traversal_verification",  # recursive_speculative_decoding
    "dynamic_tree",  # opt_tree
    *("relaxed_specdec", "relaxed_typical"),  # relaxed_margin
    "smart",  # token_recycling
    "staged_speculation",  # cs_drafting
    "windowed_mtp",  # mtp
    "aded",  # stand
    "disco",  # coupled_draft_model
    "knn_ssd",  # swift
    "suffix_fallback",  # combined
    *("efficient_rollout", "magicdec", "subspec"),  # draft_and_verify
    *("nemo_rl", "outlets", "tailsieve"),  # prompt_lookup; each as a rollout engine in tests/rollout/test_systems.py
    "war",  # consensus; likewise
}
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [4]]
CHEAP = CostModel((1, 32), (1.0, 1.5))  # measured, it would depend on what else the machine does


@functools.cache
def decoder(name, like="plain"):
    if name == "plain":
        target, params = model_of(like)
        return Decoder(configs.build("plain", target, 80), params, batch=2)
    params = model_of(name)[1]
    drafts = 0.8 * params if name in DRAFT_MODEL else own_params(name, params)
    return Decoder(narrow(build(name)), params, drafts, batch=2, cost=CHEAP)


@functools.cache
def results(name, temperature, like="plain"):
    d = decoder(name, like)
    return d.engine, d.generate(PROMPTS, 60, key=3, sampling=Sampling(temperature=temperature))


@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("name", names(set(configs.names()) - NETWORK, ALIKE))
def test_text_is_plain_decodings(name, temperature):
    engine, got = results(name, temperature)
    like = "mtp" if name in OWN_HEAD else "subspec" if name in VIEWS else "plain"
    want = results("plain", temperature, like)[1]
    for ours, plain in zip(got, want, strict=True):
        assert len(ours.tokens) == 60
        if engine.rule is match or temperature == 0 and name not in RELAXED:
            assert ours.tokens == plain.tokens
    if name != "plain":
        assert sum(r.counters["accepted"] for r in got) > 0


@pytest.mark.parametrize("name", sorted(set(configs.names()) - NETWORK))
def test_no_state_is_weakly_typed(name):
    params = model_of(name)[1]
    assert weak(build(name), params, params if name in DRAFT_MODEL else own_params(name, params)) == []


@pytest.mark.parametrize("name", configs.names())
def test_a_config_says_its_paper_and_fits_one_screen(name):
    with open(module(name).__file__) as file:
        lines = file.read().splitlines()
    assert len(lines) <= 45 and module(name).engine.__doc__
    assert name == "plain" or "arXiv" in module(name).__doc__


def test_unknown_names_and_draft_models_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="config: got 'sufix_decoding', takes one of"):
        configs.build("sufix_decoding", AuditTarget(V), 80)
    with pytest.raises(ValueError, match="speculative_sampling needs one"):
        configs.build("speculative_sampling", AuditTarget(V), 80)
    with pytest.raises(ValueError, match="plain uses none, got one"):
        configs.build("plain", AuditTarget(V), 80, draft_model=AuditTarget(V))
    for name in OWN_HEAD:
        with pytest.raises(ValueError, match="takes a Qwen model whose config has an MTP head"):
            configs.build(name, AuditTarget(V), 80)
    with pytest.raises(ValueError, match="target: got one of 1 layers, takes one of at least 3"):
        configs.build("draft_and_verify", llama(1)[0], 80)


def test_a_config_says_which_parts_it_takes():
    assert configs.parts("plain") == {} and configs.parts("svip") == {"draft_model": True}
    assert configs.parts("domino") == {"network": True, "head": False} and configs.parts("combined") == {
        "drafter": True
    }
    with pytest.raises(ValueError, match="config: got 'sufix_decoding', takes one of"):
        configs.parts("sufix_decoding")


def test_parameters_that_a_drafter_shares_with_the_target():
    params = model_of("mtp")[1]
    assert configs.drafter_params("mtp", params).mtp is params.mtp
    assert configs.drafter_params("goose", params) is None
    whole = llama()[1]
    kept = configs.drafter_params("draft_and_verify", whole)
    assert [x is y for x, y in zip(kept.layers, whole.layers[::2], strict=True)] == [True, True]
    assert configs.drafter_params("magicdec", whole) is whole
