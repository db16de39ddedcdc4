"""D29: after warm-up nothing compiles and nothing grows, whatever the requests' lengths."""

import jax
import jax.numpy as jnp
import numpy as np

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


def decoder():
    e = Engine(TableTarget(kit.WORDS, 2), 64, TableDrafter((-1, 0, 0, 1), "point"), prefill_chunk=8)
    guess = Guess(LIKELY, LIKELY, jnp.int32(3), jnp.int32(0), jnp.int32(0))
    return Decoder(e, TABLE, guess, batch=8)


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


def test_programs_and_memory_stay_as_they_are():
    d = decoder()
    serve(d, some(20, 0))
    programs, compiled = d.programs, len(COMPILED)
    alive = sum(x.nbytes for x in jax.live_arrays())
    requests = some(300, 1)
    results = serve(d, requests)
    assert (d.programs, len(COMPILED)) == (programs, compiled) and programs <= 5
    assert compiled > 0
    assert sum(x.nbytes for x in jax.live_arrays()) <= alive
    noise = kit.gumbels(np.stack([kit.key_of(i) for i in range(len(requests))]), 64)
    for i, (prompt, budget, seed, sampling) in enumerate(requests):
        want = generate(kit.logits_of(TABLE), prompt, budget, sampling, noise[seed])
        assert list(results[20 + i].tokens) == want.tokens
    assert sum(r.counters["accepted"] for r in results.values()) > 300


def test_an_array_and_a_program_too_many_are_seen():
    alive, compiled = sum(x.nbytes for x in jax.live_arrays()), len(COMPILED)
    kept = jax.jit(lambda x: x + 29)(np.zeros(29, np.int32))
    assert sum(x.nbytes for x in jax.live_arrays()) >= alive + kept.nbytes and len(COMPILED) == compiled + 1


def test_many_rounds():
    """20,000 rounds of one program: text from its own end on, again and again."""
    e = kit.engine(kit.Follow(kit.K, kit.WORDS))
    tables, rounds, text = TABLE[None], 0, [0]
    while rounds < 20_000:
        params = kit.engine_params(e, tables, kit.plan([text], 0, kit.K, 1))
        state = kit.run(e, params, request(e, text[-1:]))
        rounds, text = rounds + int(state.rows.counters.rounds[0]), kit.output(state, 0)
        assert len(text) == kit.MAX_LEN - 1 and kit.holds_text(state, 0)
