"""The target's own text, from the engine to the disk, and prompts that are made up or passed over."""

import numpy as np
import pytest

from spec_jax.engine.decoder import Decoder
from spec_jax.engine.engine import Engine
from spec_jax.models.toy import AuditTarget, audit_table
from spec_jax.sampling.settings import Sampling
from spec_jax.train import prompts
from spec_jax.train.responses import regenerate
from spec_jax.train.store import Store

V = 8
PROMPTS = [(1, 2, 3), (4,), (5, 6), (7, 1), (2, 2), (3,)]
HOT = Sampling(temperature=1.0)


@pytest.fixture(scope="module")
def decoder():
    return Decoder(Engine(AuditTarget(V), max_len=24, prefill_chunk=8), audit_table(V), batch=2, eos=[0])


@pytest.fixture(scope="module")
def alone():
    return Decoder(Engine(AuditTarget(V), max_len=24, prefill_chunk=8), audit_table(V), batch=1, eos=[0])


def test_responses_are_the_engines_and_go_on_after_a_stop(tmp_path, decoder, alone):
    def stop(tokens, left=[3]):  # noqa: B006
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    store = Store(tmp_path, {"vocab_size": V})
    with pytest.raises(KeyboardInterrupt):
        regenerate(decoder, PROMPTS, 10, store, key=5, sampling=HOT, shard=1, chunk_rounds=2, report=stop)
    some = store.numbers()
    assert some and some != set(range(6))
    with pytest.raises(ValueError, match="takes an idle one"):
        regenerate(decoder, PROMPTS, 10, store)
    for job in [job for job in decoder._slots if job is not None]:
        decoder.close(job.id)
    for job in list(decoder._waiting):
        decoder.close(job.id)
    list(decoder.run())
    regenerate(decoder, PROMPTS, 10, store, key=5, sampling=HOT, shard=2)
    found = store.read()
    assert [text.number for text in found] == list(range(6))
    other = Store(tmp_path / "whole", {"vocab_size": V})
    regenerate(alone, PROMPTS, 10, other, key=5, sampling=HOT)
    for a, b, prompt in zip(found, other.read(), PROMPTS, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)  # whatever the batch, the order and the stop
        np.testing.assert_array_equal(a.tokens[: len(prompt)], prompt)
        np.testing.assert_array_equal(a.mask, np.arange(len(a.tokens)) >= len(prompt))
    keys = {tuple(text.tokens[len(p) :].tolist()) for text, p in zip(found, PROMPTS, strict=True)}
    assert len(keys) > 3  # each has its own key


def test_beginnings_are_passages():
    texts = [list(range(100)), list(range(200, 230)), [300]]
    found = prompts.beginnings(texts, 200, 3, 10, seed=0)
    assert len(found) == 200 and {len(p) for p in found} == set(range(3, 11))
    assert all(p[0] != 300 and (np.diff(p) == 1).all() for p in found)
    assert any(p[0] == 0 for p in found) and any(p[0] > 200 for p in found)
    assert found == prompts.beginnings(texts, 200, 3, 10, seed=0) != prompts.beginnings(texts, 200, 3, 10, seed=1)
    with pytest.raises(ValueError, match="texts: got none of 200 tokens"):
        prompts.beginnings(texts, 1, 200, 300)
    with pytest.raises(ValueError, match="shortest, longest: got 5 and 4"):
        prompts.beginnings(texts, 1, 5, 4)


def test_made_up_prompts_end_where_the_users_turn_does(alone):
    found = prompts.made_up(alone, [1, 2], stop=[3], after=[4, 5], count=12, longest=8, key=1)
    assert found and len(set(found)) == len(found)
    for prompt in found:
        assert prompt[:2] == (1, 2) and prompt[-3:] == (3, 4, 5)
        assert 1 <= len(prompt) - 5 <= 7 and 3 not in prompt[2:-3]


def test_prompts_that_share_a_run_with_a_held_out_text_are_passed_over():
    held_out = [tuple(range(20)), (50, 51)]
    given = [(0, 1, 2, 3, 9), tuple(range(5, 19)), (50, 52, 51), (49, 50, 51), (7,)]
    assert prompts.without_overlap(given, held_out, n=5) == [(0, 1, 2, 3, 9), (50, 52, 51), (7,)]
    assert prompts.without_overlap(given, [], n=5) == given
    assert prompts.without_overlap(given, held_out, n=4) == [(50, 52, 51), (7,)]
    with pytest.raises(ValueError, match="n: got 0"):
        prompts.without_overlap(given, held_out, n=0)
