"""The retrieval drafters in the engine: the same text as plain decoding, in fewer passes."""

import functools

import numpy as np
import pytest

from spec_jax.control.budget import Always
from spec_jax.control.cost import CostModel
from spec_jax.control.thompson import Thompson
from spec_jax.control.throughput import Throughput
from spec_jax.drafters.aded import Aded
from spec_jax.drafters.lookahead import Lookahead
from spec_jax.drafters.ngram import NGram
from spec_jax.drafters.none import NoDrafter
from spec_jax.drafters.recycling import Recycling
from spec_jax.drafters.rest import Rest, build_store
from spec_jax.drafters.stand import Stand
from spec_jax.drafters.suffix import Suffix
from spec_jax.engine.decoder import Decoder
from spec_jax.engine.engine import Engine
from spec_jax.models.toy import TableTarget
from spec_jax.sampling.settings import Sampling

V = 16
COST = CostModel((1, 8), (1.0, 1.5))
DRAFTERS = {
    "ngram": NGram(7, 3, 1),
    "suffix": Suffix(nodes=8, longest=8, store=64),
    "recycling": Recycling(V, nodes=8, rates=(0.5, 0.2, 0.1)),
    "lookahead": Lookahead(window=4, ngram=3, guesses=3, pool=64),
    "likeliest guesses": Lookahead(window=4, ngram=3, guesses=3, pool=64, candidates=1),
    "stand": Stand(V, nodes=8, rates=(0.5, 0.2, 0.1), offered=16, longest=2, entries=512),
    "law alone": Stand(V, nodes=8, rates=(0.5, 0.2, 0.1), offered=16, longest=2, entries=512, b=0.0),
    "aded": Aded(V, nodes=8, kept=3, longest=2, entries=512, walks=16),
    "rest": Rest(nodes=8, matches=4, longest=4),
}
SETTINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.6, top_p=0.9)}


def decoder_of(name):
    table = np.random.default_rng(0).normal(0, 2.0, (V, V, V)).astype(np.float32)
    drafter = DRAFTERS.get(name, NoDrafter())
    widths = (1, 8) if drafter.nodes == 8 else ()
    controller = Always() if not widths else Thompson() if name == "recycling" else Throughput()
    engine = Engine(TableTarget(V, 2), 64, drafter=drafter, controller=controller, widths=widths, prefill_chunk=8)
    corpus = [r.tokens for setting in SETTINGS for r in results("none", setting)] if name == "rest" else None
    return Decoder(engine, table, corpus and build_store(corpus), batch=2, cost=COST)


@functools.cache
def results(name, setting):
    decoder = decoder_of(name)
    prompts = [np.random.default_rng(i).integers(0, V, 1 + 3 * i).tolist() for i in range(7)]
    for i, prompt in enumerate(prompts):
        decoder.submit(prompt, 40, key=i, sampling=SETTINGS[setting])
    return sorted((u.result for u in decoder.run(4) if u.result), key=lambda r: r.id)


def passes(found):
    return sum(r.counters["rounds"] for r in found)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_same_text_in_fewer_passes(name, setting):
    plain, drafted = results("none", setting), results(name, setting)
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    assert passes(drafted) < passes(plain) == sum(len(r.tokens) for r in plain)


@pytest.mark.parametrize(("name", "without"), [("stand", "law alone"), ("lookahead", "likeliest guesses")])
def test_the_position_s_noise_makes_drafts_of_sampled_text_better(name, without):
    assert passes(results(name, "sampled")) < 0.95 * passes(results(without, "sampled"))


def test_outputs_of_earlier_requests_are_drafted_from():
    """The same request twice: the second time it is in the store."""
    decoder = decoder_of("suffix")
    first, second = (decoder.generate([[1, 2, 3]], 40, key=5, sampling=SETTINGS["sampled"])[0] for _ in range(2))
    assert first.tokens == second.tokens and len(first.tokens) == 40
    assert second.counters["rounds"] < first.counters["rounds"] / 2
