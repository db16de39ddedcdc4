"""The audits that users run: sound set-ups pass, and each planted fault is caught."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from spec_jax.audit.law import check_law, chi_square
from spec_jax.audit.replay import Replay, replay
from spec_jax.audit.state import check_state
from spec_jax.drafters.scripted import Script, Scripted
from spec_jax.engine.decoder import Decoder
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.models.toy import AuditTarget, TableTarget, audit_table
from spec_jax.sampling.constraint import free
from spec_jax.sampling.settings import Sampling
from spec_jax.verify.match import match

V = 8


class OneTooFar(AuditTarget):
    """Commits one node more than was accepted."""

    def commit(self, state, staged, path, length):
        return super().commit(state, staged, path, jnp.where(length > 1, length + 1, length))


class KeepsRejected(AuditTarget):
    """Commits the right number of nodes, but the first ones rather than the path's."""

    def commit(self, state, staged, path, length):
        moved = super().commit(state, staged, path, length)
        last = jnp.maximum(moved.length - 1, 0)
        slots = jax.vmap(lambda s, i: s.at[i].add(1))(moved.slots, last)
        return dataclasses.replace(moved, slots=jnp.where(length[:, None] == 2, slots, moved.slots))


def test_state_audit_passes_a_sound_target():
    report = check_state(AuditTarget(V), audit_table(V), [1, 2, 3], k=3, rounds=3, patterns=64)
    assert (report.text_equal, report.error, len(report.accepted)) == (True, 0.0, 64)


@pytest.mark.parametrize("target", (OneTooFar(V), KeepsRejected(V)), ids=lambda t: type(t).__name__)
def test_state_audit_catches_wrong_commits(target):
    report = check_state(target, audit_table(V), [1, 2, 3], k=3, rounds=3, patterns=64)
    assert report.error > 0.1 or not report.text_equal


def test_state_audit_of_a_real_architecture():
    from tests.models.test_llama import small

    target, params = small()
    report = check_state(target, params, [5, 6, 7, 8], k=2, rounds=3, patterns=27)
    assert report.text_equal and 0 <= report.error < 1e-4


def hot_noise(key, draft, scores, m):
    """A rule that samples at another temperature."""
    row = dataclasses.replace(scores.row, temperature=scores.row.temperature * 0.6)
    return match(key, draft, dataclasses.replace(scores, row=row), m)


@functools.cache
def law(rule, batch=512):
    script = Script(jnp.full((batch, 16), 3), jnp.full((batch, 16), 2))
    engine = Engine(AuditTarget(V), 16, drafter=Scripted(3, V), rule=rule)
    params = EngineParams(audit_table(V), script, free(V), jnp.ones(1))
    return check_law(engine, params, [1, 2], [0, 3, 4, 5], draws=20_000, batch=batch)


def test_law_audit_passes_the_default_rule():
    report = law(match)
    assert report.passed and report.draws == 20_000 and 0 < report.acceptance < 1


def test_law_audit_catches_another_temperature():
    assert not law(hot_noise).passed


def test_chi_square_is_that_of_scipy():
    rng = np.random.default_rng(0)
    for cells in (2, 3, 6, 25, 64):
        exact = rng.dirichlet(np.ones(cells))
        observed = rng.multinomial(100_000, exact)
        kept = exact * 100_000 >= 10
        assert kept.all() or exact[~kept].sum() * 100_000 < 10
        o, e = observed[kept], exact[kept] * 100_000
        want = stats.chi2.sf(((o - e) ** 2 / e).sum(), kept.sum() - 1)
        np.testing.assert_allclose(chi_square(observed, exact), want, rtol=1e-6)


SETTINGS = (
    Sampling(),
    Sampling(temperature=1.0, top_p=0.8, min_p=0.05),
    Sampling(temperature=0.7, top_k=3, presence_penalty=0.5, repetition_penalty=1.2),
)


@pytest.mark.parametrize("sampling", SETTINGS)
def test_replay_accepts_the_engines_text_and_no_other(sampling):
    target, table = AuditTarget(V), audit_table(V)
    result = Decoder(Engine(target, 48), table).generate([[1, 2, 3]], 30, key=4, sampling=sampling)[0]
    check = functools.partial(replay, target, table, [1, 2, 3], key=4, sampling=sampling, max_len=48)
    assert check(result.tokens) == Replay(30, 0, 0)
    for at in (0, 13, 29):
        wrong = list(result.tokens)
        wrong[at] = (wrong[at] + 1) % V
        counts = check(wrong)
        assert counts.different >= 1 and sum(dataclasses.astuple(counts)) == 30
    if sampling.temperature:
        assert check(result.tokens, key=5).different > 3


class Shaky(TableTarget):
    """Logits that depend a little on how many nodes are scored at once."""

    def score(self, params, state, tree, staged=None, nodes=None):
        output, staged, state = super().score(params, state, tree, staged, nodes)
        noise = 1e-3 * jax.random.normal(jax.random.key(tree.tokens.shape[1]), output.logits.shape[-1:])
        return dataclasses.replace(output, logits=output.logits + noise), staged, state


def test_replay_tells_near_ties_from_differences():
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(V, V)), jnp.float32)
    order = np.argsort(-np.asarray(table), axis=1)
    tied = table.at[jnp.arange(V), order[:, 1]].set(table[jnp.arange(V), order[:, 0]] - 1e-5)
    text = [1]
    for _ in range(20):
        text.append(int(order[text[-1], 1]))
    counts = replay(Shaky(V), tied, text[:1], text[1:], max_len=32)
    assert counts.different == 0 and counts.near_tie + counts.equal == 20
    assert replay(Shaky(V), table, text[:1], text[1:], max_len=32).different > 10
    assert replay(TableTarget(V), tied, text[:1], text[1:], max_len=32).different > 0
