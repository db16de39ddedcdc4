"""Every system whose drafter is a head on the target's features, end to end: text is plain decoding's."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from spec_jax import configs
from spec_jax.drafters.block.ends import ends_of
from spec_jax.drafters.eagle import network
from spec_jax.drafters.eagle.config import EagleConfig
from spec_jax.engine.decoder import Decoder
from spec_jax.engine.engine import Engine
from spec_jax.models.qwen import Qwen
from spec_jax.sampling.settings import Sampling
from tests.configs.targets import BLOCK, NETWORK, weak
from tests.drafters.block import kit
from tests.drafters.eagle import kit as heads
from tests.drafters.hybrid import V, fair

LLAMA = {name: heads.CONFIGS[name] for name in ("eagle3", "p_eagle", "medusa", "hydra")}
LLAMA |= {
    "eagle2": heads.CONFIGS["eagle1"],
    "eagle3_post_norm": heads.CONFIGS["eagle3.1"],
    "vocab_trim": dataclasses.replace(heads.CONFIGS["eagle3"], own_head=False),
}


def texts(engine, own=None, params=None):
    return kit.decoded(dataclasses.replace(engine, max_len=20, prefill_chunk=8), own, params)


@functools.cache
def plain():
    return np.asarray(texts(Engine(kit.llama()[0], 24)).tokens)


@pytest.mark.parametrize("name", LLAMA)
def test_text_is_plain_decodings(name):
    config = LLAMA[name]
    engine = configs.build(name, kit.llama()[0], 24, network=config)
    assert weak(engine, kit.llama()[1], heads.params(config)) == []
    got = texts(engine, heads.params(config))
    np.testing.assert_array_equal(got.tokens, plain())
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


def test_every_system_with_a_head_on_features_is_here():
    assert {*LLAMA, "specla"} == NETWORK - BLOCK


def test_networks_that_a_system_cannot_use_are_refused():
    with pytest.raises(ValueError, match="network: eagle3 needs one"):
        configs.build("eagle3", kit.llama()[0], 24)
    with pytest.raises(ValueError, match="target is"):
        configs.build("eagle3", fair()[0], 24, network=heads.CONFIGS["eagle3"])
    for name, message in (("eagle3_post_norm", "norm_output is False"), ("vocab_trim", "own_head is True")):
        with pytest.raises(ValueError, match=message):
            configs.build(name, kit.llama()[0], 24, network=heads.CONFIGS["eagle3"])
    assert V != kit.V
