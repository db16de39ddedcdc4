"""Coupled ranking: right for a perfect drafter, fitted from choices, and better than what doesn't know the noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import noise
from spec_jax import tree as trees
from spec_jax.sampling import transform
from spec_jax.sampling.settings import Sampling, to_row
from spec_jax.topology import coupling, sampled
from spec_jax.topology.coupling import Candidates, Learner
from spec_jax.topology.marginals import best_first
from spec_jax.tree import Draft
from spec_jax.verify import match, rejection
from tests.verify import walks

V = 64
SETTINGS = {
    "greedy": Sampling(),
    "plain": Sampling(temperature=1.0),
    "warm": Sampling(temperature=0.6),
    "truncated": Sampling(temperature=1.3, top_p=0.8, top_k=20),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_perfect_drafter_has_the_targets_choice_first(name):
    row, n = to_row(SETTINGS[name], V), 400
    z = jnp.asarray(np.random.default_rng(1).normal(0, 2, (n, V)), jnp.float32)

    @jax.jit
    @jax.vmap
    def both(z, key, position):
        one = jnp.float32(1)
        c = coupling.candidates(z, row, coupling.scaled_noise(row, key, position, V), one, one, V)
        chance = coupling.log_chance(c, one, one)
        return c.tokens[jnp.argmax(chance)], transform.choose(z, row, key, position), jnp.exp(chance).sum()

    first, choice, total = both(z, walks.keys(n), jnp.arange(n) % 7)
    np.testing.assert_array_equal(first, choice)
    np.testing.assert_allclose(total, 1.0, rtol=1e-5)


def test_candidates_are_the_best_tokens_with_their_noise():
    z = jnp.asarray(np.random.default_rng(2).normal(0, 2, V), jnp.float32)
    row, key, a, b = to_row(Sampling(temperature=0.7), V), noise.request_key(5), jnp.float32(2), jnp.float32(0.5)
    noisy = coupling.scaled_noise(row, key, jnp.int32(9), V)
    np.testing.assert_allclose(noisy, 0.7 * noise.gumbel(key, jnp.int32(9), jnp.arange(V)), rtol=1e-6)
    c = coupling.candidates(z, row, noisy, a, b, 5)
    order = np.argsort(-np.asarray(a * z + b * noisy))[:5]
    assert c.tokens.tolist() == order.tolist()
    np.testing.assert_allclose(c.z, (z - z.max())[order], rtol=1e-5)
    np.testing.assert_allclose(c.noise, noisy[order])
    utility = np.exp(a * c.z + b * c.noise)
    np.testing.assert_allclose(np.exp(coupling.log_chance(c, a, b)), utility / utility.sum(), rtol=1e-5)


def test_candidates_outside_the_support_are_none_and_greedy_rows_have_no_noise():
    z, one = jnp.asarray(np.random.default_rng(2).normal(0, 2, V), jnp.float32), jnp.float32(1)
    row = to_row(Sampling(temperature=0.7, top_k=3), V)
    c = coupling.candidates(z, row, coupling.scaled_noise(row, noise.request_key(5), jnp.int32(9), V), one, one, 5)
    assert set(c.tokens[:3].tolist()) == set(np.argsort(-np.asarray(z))[:3].tolist())
    assert (c.z[3:] == -jnp.inf).all() and (coupling.log_chance(c, one, one)[3:] == -jnp.inf).all()
    row = to_row(Sampling(), V)
    greedy = coupling.candidates(z, row, coupling.scaled_noise(row, noise.request_key(5), jnp.int32(9), V), one, one, 5)
    assert not greedy.noise.any() and greedy.tokens.tolist() == np.argsort(-np.asarray(z))[:5].tolist()


def simulate(rng, w, rows, m=12):
    """Rounds of choices that follow the model: candidates [rows, depth, m], and what was chosen among them."""
    shape = (rows, len(w), m)
    z, g = -np.abs(rng.normal(0, 2, shape)), rng.gumbel(size=shape)
    utility = np.asarray(w)[:, :1] * z + np.asarray(w)[:, 1:] * g + rng.gumbel(size=shape)
    tokens = np.broadcast_to(np.arange(100, 100 + m), shape)
    return Candidates(*(jnp.asarray(x) for x in (tokens, z, g))), jnp.asarray(100 + utility.argmax(-1))


def fitted(learner, w, rounds, rows, known=lambda chosen: chosen):
    rng, fit = np.random.default_rng(3), learner.init(len(w))
    observe = jax.jit(learner.observe)
    for _ in range(rounds):
        seen, chosen = simulate(rng, w, rows)
        fit = observe(fit, seen, known(chosen))
    weights = learner.weights(fit)
    return np.stack([weights.a, weights.b], axis=-1)


def test_the_fit_finds_the_weights_that_made_the_choices():
    truth = [(1.6, 1.1), (1.2, 0.6), (0.7, 0.2)]
    np.testing.assert_allclose(fitted(Learner(decay=1.0), truth, 60, 100), truth, atol=0.08)


def test_the_fit_follows_a_change():
    learner, rng = Learner(decay=0.9), np.random.default_rng(4)
    fit, observe = learner.init(1), jax.jit(learner.observe)
    for truth in ([(2.0, 1.5)], [(0.5, 0.1)]):
        for _ in range(60):
            fit = observe(fit, *simulate(rng, truth, 200))
    weights = learner.weights(fit)
    np.testing.assert_allclose([weights.a[0], weights.b[0]], truth[0], atol=0.1)


def test_a_depth_without_choices_leans_on_the_one_above():
    truth = [(1.6, 1.1), (1.2, 0.6), (1.2, 0.6)]
    got = fitted(Learner(decay=1.0), truth, 30, 100, lambda chosen: chosen.at[:, 2].set(-1))
    np.testing.assert_allclose(got[2], got[1], rtol=1e-5)
    few = fitted(Learner(decay=1.0, pooling=1e6), truth, 30, 100)
    np.testing.assert_allclose(few, np.broadcast_to([1.2, 1.0], few.shape), atol=0.02)


def test_what_is_no_candidate_teaches_nothing():
    learner = Learner()
    observe = jax.jit(learner.observe)
    seen, chosen = simulate(np.random.default_rng(5), [(1.0, 1.0)], 50)
    for unknown in (jnp.full_like(chosen, -1), jnp.full_like(chosen, 7)):
        fit = observe(learner.init(1), seen, unknown)
        assert not fit.h.any() and not fit.r.any()
    none = Candidates(seen.tokens, seen.z.at[:, :, 1:].set(-jnp.inf), seen.noise)
    fit = observe(learner.init(1), none, chosen)
    assert np.isfinite(fit.h).all() and np.isfinite(fit.r).all()


D, NODES, TRIALS = 10, 16, 1024
TOYS = {"flat, good": (2.0, 0.5), "sharp, good": (3.0, 0.7)}


@functools.cache
def toy(name):
    """Tokens per target pass of four drafts of factorised positions, and their standard errors."""
    sharp, error = TOYS[name]
    row, rng, learner = to_row(Sampling(temperature=1.0), V), np.random.default_rng(0), Learner(decay=1.0)
    log_p = rng.normal(0, sharp, (TRIALS, D, V))
    log_q = log_p + rng.normal(0, error, log_p.shape)
    log_p, log_q = (jax.nn.log_softmax(jnp.asarray(x, jnp.float32)) for x in (log_p, log_q))
    keys, past, positions = walks.keys(2 * TRIALS), jnp.int32(4), jnp.arange(4, 4 + D)

    def at(q, key):
        noisy = jax.vmap(lambda t: coupling.scaled_noise(row, key, t, V))(positions)
        one = jnp.float32(1)
        return jax.vmap(lambda q, noisy: coupling.candidates(q, row, noisy, one, one, V))(q, noisy)

    @jax.jit
    def fit(log_p, log_q, keys):
        seen = jax.vmap(at)(log_q, keys)
        choose = jax.vmap(lambda p, key: jax.vmap(lambda p, t: transform.choose(p, row, key, t))(p, positions))
        state = learner.init(D)
        for _ in range(4):
            state = learner.observe(state, seen, choose(log_p, keys))
        return learner.weights(state)

    weights = fit(log_p, log_q, keys[TRIALS:])

    def coupled(key, q):
        c = at(q, key)
        return best_first(jax.vmap(coupling.log_chance)(c, weights.a, weights.b), c.tokens, past, NODES, "coupled")

    def point(key, q):
        return best_first(q, jnp.broadcast_to(jnp.arange(V), q.shape), past, NODES)

    def drawn(key, q, widths):
        return sampled.branching(key, past, sampled.by_depth(q), widths, positions[0], False)

    def accepted(rule, build):
        def one(key, p, q):
            draft: Draft = build(key, q)
            logits = p[jnp.minimum(trees.depth(draft.tree.parent), D - 1)]
            scores = walks.scores(logits, Sampling(temperature=1.0), 4)
            return rule(key, draft, scores, D).accepted + 1

        lengths = np.asarray(jax.jit(jax.vmap(one))(keys[:TRIALS], log_p, log_q), float)
        return lengths.mean(), lengths.std() / TRIALS**0.5

    shapes = ((2, 2, 1, 1), (2, 1, 1, 1, 1, 1, 1), (3, 1, 1, 1, 1))
    return {
        "coupled": accepted(match.match, coupled),
        "point": accepted(match.match, point),
        "rsd": max(accepted(rejection.rejection, functools.partial(drawn, widths=s)) for s in shapes),
    }


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize("other", ("point", "rsd"))
def test_coupled_trees_beat_trees_that_do_not_know_the_noise(name, other):
    (ours, error), (theirs, their_error) = toy(name)["coupled"], toy(name)[other]
    assert ours > 1.05 * theirs and ours - theirs > 3 * (error**2 + their_error**2) ** 0.5
