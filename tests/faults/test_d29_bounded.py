"""D29: after warm-up nothing compiles and nothing grows, whatever the requests' lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.drafters.suffix import Suffix
from spec_jax.engine.decoder import Decoder
from spec_jax.engine.engine import Engine
from spec_jax.engine.requests import request
from spec_jax.models.toy import TableTarget
from spec_jax.sampling.settings import Sampling
from tests.faults import kit
from tests.faults.drafters import Guess, TableDrafter
from tests.faults.oracle import generate

TABLE = kit.row_tables(29, 1)[0]
LIKELY = TABLE.max(axis=0)
COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: COMPILED.append(event) if event.endswith("backend_compile_duration") else None
)


def decoder(drafter=None, made=Decoder):
    plan = Guess(LIKELY, LIKELY, jnp.int32(3), jnp.int32(0), jnp.int32(0)) if drafter is None else None
    drafter = TableDrafter((-1, 0, 0, 1), "point") if drafter is None else drafter
    e = Engine(TableTarget(kit.WORDS, 2), 64, drafter, prefill_chunk=8)
    return made(e, TABLE, plan, batch=8)


def serve(d, requests):
    for prompt, budget, seed, sampling in requests:
        d.submit(prompt, budget, key=seed, sampling=sampling)
    return {u.result.id: u.result for u in d.run(chunk_rounds=4) if u.result is not None}


def some(n, seed):
    rng = np.random.default_rng(seed)
    settings = [Sampling(), Sampling(temperature=0.8), Sampling(temperature=1.0, top_p=0.9, presence_penalty=0.5)]
    return [
        (rng.integers(0, kit.WORDS, rng.integers(1, 21)).tolist(), int(rng.integers(1, 41)), i, settings[i % 3])
        for i in range(n)
    ]


def grown(d, requests):
    """Results, and how many programs and bytes there are more than before, arrays on the host aside."""
    programs, compiled, alive = d.programs, len(COMPILED), sum(x.nbytes for x in jax.live_arrays())
    results = serve(d, requests)
    more = sum(x.nbytes for x in jax.live_arrays()) - alive
    return results, d.programs - programs, len(COMPILED) - compiled, more


@pytest.mark.parametrize(("drafter", "count"), [(None, 300), (Suffix(nodes=4, longest=4, store=512), 60)])
def test_programs_and_memory_stay_as_they_are(drafter, count):
    compiled, d = len(COMPILED), decoder(drafter)
    serve(d, some(20, 0))
    assert d.programs <= 5 and len(COMPILED) > compiled
    requests = some(count, 1)
    results, *more = grown(d, requests)
    assert more[:2] == [0, 0] and more[2] <= 0
    noise = kit.gumbels(np.stack([kit.key_of(i) for i in range(len(requests))]), 64)
    for i, (prompt, budget, seed, sampling) in enumerate(requests):
        want = generate(kit.logits_of(TABLE), prompt, budget, sampling, noise[seed])
        assert list(results[20 + i].tokens) == want.tokens
    assert sum(r.counters["accepted"] for r in results.values()) > (count if drafter is None else 0)


class Hoarding(Decoder):
    """A decoder that holds on to what has finished, on the device."""

    def step(self, chunk_rounds):
        updates = super().step(chunk_rounds)
        self.hoard = [*getattr(self, "hoard", ()), *(jnp.asarray(u.result.tokens) for u in updates if u.result)]
        return updates


class Ragged(Decoder):
    """A decoder with a program for every length of a prompt."""

    def submit(self, prompt, *arguments, **options):
        jax.jit(lambda x: x + 29)(np.array(prompt))
        return super().submit(prompt, *arguments, **options)


def test_an_array_and_a_program_too_many_are_seen():
    """Both faults leave the texts as they are; what is measured above sees each, and that one alone."""
    d = decoder(made=Hoarding)
    serve(d, some(20, 0))
    assert all(len(r.tokens) for r in grown(d, some(8, 1))[0].values())
    _, programs, compiled, alive = grown(d, some(8, 1))
    assert (programs, compiled) == (0, 0) and alive > 0
    d = decoder(made=Ragged)
    serve(d, [([1, 2], 4, 0, Sampling())])
    _, programs, compiled, alive = grown(d, [([1, 2, 3], 4, 0, Sampling())])
    assert compiled > 0 and alive <= 0


def test_many_rounds():
    """20,000 rounds of one program: text from its own end on, again and again."""
    e = kit.engine(kit.Follow(kit.K, kit.WORDS))
    tables, rounds, text = TABLE[None], 0, [0]
    while rounds < 20_000:
        params = kit.engine_params(e, tables, kit.plan([text], 0, kit.K, 1))
        state = kit.run(e, params, request(e, text[-1:]))
        rounds, text = rounds + int(state.rows.counters.rounds[0]), kit.output(state, 0)
        assert len(text) == kit.MAX_LEN - 1 and kit.holds_text(state, 0)
