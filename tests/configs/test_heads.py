"""Every system whose drafter is a head on the target's features, end to end: text is plain decoding's."""

import dataclasses
import functools
import json
import pathlib

import jax
import numpy as np
import pytest

from spec_jax import configs
from spec_jax.control.budget import Always
from spec_jax.drafters import load
from spec_jax.drafters.block.ends import ends_of
from spec_jax.drafters.block.network import BlockParams, init_network
from spec_jax.drafters.eagle import network
from spec_jax.drafters.eagle.config import EagleConfig
from spec_jax.drafters.early_exit import EarlyExitConfig
from spec_jax.drafters.load import load_drafter
from spec_jax.drafters.parallel_model import ParallelConfig
from spec_jax.drafters.recurrent import RecurrentConfig
from spec_jax.engine.decoder import Decoder
from spec_jax.engine.engine import Engine
from spec_jax.models import qwen_tensors
from spec_jax.models.load import load_target
from spec_jax.models.qwen import Qwen
from spec_jax.sampling.settings import Sampling
from spec_jax.verify.match import match
from tests.configs.targets import BLOCK, NETWORK, names, narrow, weak
from tests.drafters.block import kit
from tests.drafters.eagle import kit as heads
from tests.drafters.hybrid import V, fair
from tests.models import qwen_kit

TRAINED = pathlib.Path(load.__file__).with_name("trained")
LLAMA = {name: heads.CONFIGS[name] for name in ("eagle3", "p_eagle", "medusa", "hydra", "mlp_speculator")}
LLAMA |= {
    "eagle": heads.CONFIGS["eagle1"],
    "eagle2": heads.CONFIGS["eagle1"],
    "redrafter": RecurrentConfig(heads.V, heads.H, final_norm_eps=heads.EPS),
    "eagle3_post_norm": heads.CONFIGS["eagle3.1"],
    "pard": ParallelConfig(dataclasses.replace(kit.LLAMA, num_layers=1), kit.MASK, depth=3),
    "kangaroo": EarlyExitConfig(kit.LLAMA, layers=1, adapter=2),
    "eesd": EarlyExitConfig(kit.LLAMA, layers=1, adapter=2),
    "vocab_trim": dataclasses.replace(heads.CONFIGS["eagle3"], own_head=False),
}


def texts(engine, own=None, params=None):
    return kit.decoded(dataclasses.replace(engine, max_len=20, prefill_chunk=8), own, params)


@functools.cache
def plain():
    return np.asarray(texts(Engine(kit.llama()[0], 24)).tokens)


# As eagle, eagle3, kangaroo and hydra, and round by round in drafters/.
@pytest.mark.parametrize("name", names(LLAMA, {"eagle2", "eagle3_post_norm", "eesd", "mlp_speculator"}))
def test_text_is_plain_decodings(name):
    config = LLAMA[name]
    engine = narrow(configs.build(name, kit.llama()[0], 24, network=config))
    assert weak(engine, kit.llama()[1], heads.params(config)) == []
    got = texts(engine, heads.params(config))
    exact = slice(None) if engine.rule is match else slice(len(kit.PROMPTS))
    np.testing.assert_array_equal(np.asarray(got.tokens)[exact], plain()[exact])
    assert (got.counters.accepted.sum(), got.counters.drafted.sum()) > (0, 0)


def test_specla_on_a_hybrid():
    """A recurrent target, an EAGLE-3 head on it, and drafts cut where it is not sure."""
    target, params = fair()
    assert isinstance(target, Qwen)
    c = target.config
    config = EagleConfig(c.vocab_size, c.hidden_size, 24, 2, 1, 8, taps=(0, 1, 2), rms_norm_eps=c.rms_norm_eps)
    own = network.init_params(config, jax.random.key(0), ends_of(params), scale=0.2)
    engine = configs.build("specla", target, 24, network=config)
    engine = dataclasses.replace(engine, prefill_chunk=8)

    def run(e, p):
        return Decoder(e, params, p, batch=3).generate(kit.PROMPTS, 16, sampling=Sampling(temperature=0.7))

    got, want = run(engine, own), run(Engine(target, 24, prefill_chunk=8), None)
    assert [r.tokens for r in got] == [r.tokens for r in want]
    drafted, rounds = (sum(r.counters[name] for r in got) for name in ("drafted", "rounds"))
    assert sum(r.counters["accepted"] for r in got) > 0 and drafted < rounds * (engine.drafter.nodes - 1)


@pytest.mark.parametrize("name", ["eagle3", pytest.param("dflash", marks=pytest.mark.slow)])
def test_a_head_on_a_gemma(name):
    """A tied, scaled embedding, sliding layers and norms of 1 + w; drafters read the table's rows as they are."""
    target = Qwen(qwen_kit.gemma())
    params = qwen_tensors.from_tensors(target.config, qwen_kit.random_tensors(target.config))
    c, key = target.config, jax.random.key(0)
    if name == "eagle3":
        config = EagleConfig(c.vocab_size, c.hidden_size, 24, 2, 1, 8, taps=(0, 1, 3), rms_norm_eps=c.rms_norm_eps)
        own = network.init_params(config, key, ends_of(params), scale=0.2)
    else:
        config = kit.config(vocab_size=c.vocab_size, hidden_size=c.hidden_size, embedding_scale=c.hidden_size**0.5)
        own = BlockParams(kit.noisy(init_network(config, key)), ends_of(params))
    engine = configs.build(name, target, 24, network=config)

    def run(e, p):
        decoder = Decoder(dataclasses.replace(e, prefill_chunk=8), params, p, batch=3)
        one, other = (decoder.generate(kit.PROMPTS, 16, sampling=Sampling(temperature=t)) for t in (0.0, 1.0))
        return [*one, *other]

    got, want = run(engine, own), run(Engine(target, 24), None)
    assert [r.tokens for r in got] == [r.tokens for r in want]
    assert sum(r.counters["drafted"] for r in got) > 0


@pytest.mark.slow
@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_specla_with_trained_weights_on_the_small_hybrid(temperature):
    """The repository's EAGLE-3 head on its gated delta target: text equal, and drafts cut where it is not sure."""
    model = load_target("small_hybrid")
    trained = load_drafter(TRAINED / "small_hybrid" / "eagle3", model)
    source = pathlib.Path(json.__file__).read_text(encoding="utf-8")
    prompts = [model.tokenizer.encode(source)[at : at + 48] for at in (100, 300, 500)]
    engine = configs.build("specla", model.target, 128, **trained.parts)
    whole = dataclasses.replace(engine, controller=Always(), widths=(engine.drafter.nodes,))

    def run(e, own):
        decoder = Decoder(e, model.params, own, batch=3)
        return decoder.generate(prompts, 64, key=2, sampling=Sampling(temperature=temperature))

    got, full, want = run(engine, trained.params), run(whole, trained.params), run(Engine(model.target, 128), None)
    assert [r.tokens for r in got] == [r.tokens for r in want] == [r.tokens for r in full]
    count = lambda results, name: sum(r.counters[name] for r in results)  # noqa: E731
    assert count(got, "drafted") < 0.9 * count(full, "drafted")
    emitted = sum(len(r.tokens) for r in got)
    assert emitted > (1.2 if temperature else 2.5) * count(got, "rounds")


def test_every_system_with_a_head_on_features_is_here():
    assert {*LLAMA, "specla"} == NETWORK - BLOCK


def test_networks_that_a_system_cannot_use_are_refused():
    with pytest.raises(ValueError, match="network: eagle3 needs one"):
        configs.build("eagle3", kit.llama()[0], 24)
    with pytest.raises(ValueError, match="target is"):
        configs.build("eagle3", fair()[0], 24, network=heads.CONFIGS["eagle3"])
    wrong = {"eagle3_post_norm": "norm_output is False", "vocab_trim": "own_head is True", "eagle": "inputs='joined'"}
    for name, message in wrong.items():
        with pytest.raises(ValueError, match=message):
            configs.build(name, kit.llama()[0], 24, network=heads.CONFIGS["eagle3"])
    assert V != kit.V
