"""A small model as drafter: the target itself (always right), and another one (sometimes right)."""

import functools

import jax
import numpy as np
import pytest

from spec_jax.audit.law import check_law
from spec_jax.drafters.small_model import SmallModel
from spec_jax.engine.decoder import Decoder
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.models.toy import AuditTarget, audit_table
from spec_jax.sampling.constraint import free
from spec_jax.sampling.settings import Sampling
from spec_jax.verify.rejection import rejection

V = 8
SETTINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.9, top_p=0.9),
    "penalties": Sampling(temperature=1.0, presence_penalty=0.7, repetition_penalty=1.3, banned_tokens=(2,)),
}


def target():
    return AuditTarget(V)


@functools.cache
def tables():
    big = audit_table(V, seed=1)
    return big, 0.7 * big + audit_table(V, seed=2, scale=0.8)


@functools.cache
def decoder(k, own):
    big, small = tables()
    engine = Engine(target(), 48, drafter=SmallModel(target(), k), log_probs=True)
    return Decoder(engine, big, big if own else small, batch=3)


@functools.cache
def plain(name):
    results = Decoder(Engine(target(), 48, log_probs=True), tables()[0], batch=3)
    return results.generate([[1, 2, 3], [4], [5, 6]], 30, key=6, sampling=SETTINGS[name])


@pytest.mark.parametrize("name", SETTINGS)
def test_the_target_as_its_own_drafter_is_always_accepted(name):
    results = decoder(3, True).generate([[1, 2, 3], [4], [5, 6]], 30, key=6, sampling=SETTINGS[name])
    for result, want in zip(results, plain(name), strict=True):
        assert result.tokens == want.tokens
        assert result.counters["rounds"] == 8 and result.counters["accepted"] == result.counters["drafted"] == 22


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("k", (1, 3))
def test_another_model_gives_the_same_text(k, name):
    results = decoder(k, False).generate([[1, 2, 3], [4], [5, 6]], 30, key=6, sampling=SETTINGS[name])
    for result, want in zip(results, plain(name), strict=True):
        assert result.tokens == want.tokens
        np.testing.assert_allclose(result.log_probs, want.log_probs, atol=1e-5)
    assert any(0 < r.counters["accepted"] < r.counters["drafted"] for r in results)


def test_its_state_follows_every_verdict():
    d = decoder(3, False)
    d.submit([1, 2, 3], 30, key=6, sampling=SETTINGS["sampled"])
    model = d.engine.drafter.model
    while d.busy:
        d.step(1)
        rows, state = d._state.rows, d._state.drafter.model
        for row in np.flatnonzero(np.asarray(rows.running)):
            length = int(rows.length[row]) - 1
            assert int(state.length[row]) == length
            want = model.entry(rows.tokens[row, :length], jax.numpy.arange(length))
            assert (np.asarray(state.slots[row, :length]) == np.asarray(want)).all()


@functools.cache
def law(rule_is_rejection):
    big, small = tables()
    options = {"rule": rejection} if rule_is_rejection else {}
    engine = Engine(target(), 16, drafter=SmallModel(target(), 2, "sampled"), **options)
    params = EngineParams(big, small, free(V), jax.numpy.ones(1))
    return check_law(engine, params, [1, 2], [0, 3, 4, 5, 7], draws=40_000, batch=1024)


@pytest.mark.parametrize("rule_is_rejection", (True, False))
def test_sampled_drafts_keep_the_law(rule_is_rejection):
    report = law(rule_is_rejection)
    assert report.passed and report.acceptance > 0.2


def test_the_classical_rule_accepts_sampled_drafts_more_often_than_match():
    assert law(True).acceptance > law(False).acceptance + 0.05


def test_a_draft_ends_where_the_model_is_not_sure():
    big, small = tables()
    decoder_ = Decoder(Engine(target(), 48, drafter=SmallModel(target(), 5, least=0.5)), big, small, batch=3)
    for name in ("greedy", "sampled"):
        results = decoder_.generate([[1, 2, 3], [4], [5, 6]], 30, key=6, sampling=SETTINGS[name])
        assert [r.tokens for r in results] == [r.tokens for r in plain(name)]
        drafted, rounds, accepted = (sum(r.counters[c] for r in results) for c in ("drafted", "rounds", "accepted"))
        assert 0 < accepted and drafted < 3 * rounds


def test_a_drawn_draft_that_ends_early_keeps_the_law():
    big, small = tables()
    drafter = SmallModel(target(), 2, "sampled", least=0.3)
    engine = Engine(target(), 16, drafter=drafter, rule=rejection)
    params = EngineParams(big, small, free(V), jax.numpy.ones(1))
    report = check_law(engine, params, [1, 2], [0, 3, 4, 5, 7], draws=40_000, batch=1024)
    assert report.passed and 0.0 < report.acceptance


def test_how_sure_a_law_is():
    p = np.array([0.5, 0.25, 0.25, 0.0], np.float32)
    with np.errstate(divide="ignore"):
        log = jax.numpy.log(jax.numpy.asarray(p))
    entropy = SmallModel(target(), 2, sure="entropy")
    np.testing.assert_allclose(SmallModel(target(), 2)._sure(log), 0.5, rtol=1e-6)
    np.testing.assert_allclose(entropy._sure(log), max(0.0, 1 - np.sqrt(1.5 * np.log(2))), atol=1e-6)
    np.testing.assert_allclose(
        entropy._sure(jax.numpy.log(jax.numpy.array([0.97, 0.03]))), 1 - np.sqrt(0.1347), atol=1e-3
    )


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="least: got 2"):
        SmallModel(target(), 2, least=2)
    with pytest.raises((ValueError, TypeError), match="sure"):
        SmallModel(target(), 2, sure="x")  # pyright: ignore
    with pytest.raises(ValueError, match="k: got 0"):
        SmallModel(target(), 0)
    with pytest.raises((ValueError, TypeError), match="mode"):
        SmallModel(target(), 2, "x")  # pyright: ignore
    with pytest.raises(ValueError, match="drafter: got one for 6"):
        Engine(target(), 16, drafter=SmallModel(AuditTarget(6), 2))
    big, small = tables()
    engine = Engine(target(), 16, drafter=SmallModel(target(), 2), rule=rejection)
    with pytest.raises(ValueError, match="takes a 'sampled' or"):
        Decoder(engine, big, small).generate([[1]], 2)
