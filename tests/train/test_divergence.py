"""Divergences against a statement in float64, and at the edge of the simplex."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.train import divergence

RNG = np.random.default_rng(0)
Q, P = RNG.normal(0, 2, (5, 7)), RNG.normal(0, 2, (5, 7))


def law(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def kl(a, b):
    return (a * np.log(a / b)).sum(-1)


def statements():
    q, p = law(Q), law(P)
    m, alpha = (p + q) / 2, np.minimum(p, q).sum(-1)
    weight = 0.8 * np.exp(-2 * alpha)
    return {
        "forward_kl": kl(p, q),
        "reverse_kl": kl(q, p),
        "jsd": (kl(p, m) + kl(q, m)) / 2,
        "tv": np.abs(p - q).sum(-1) / 2,
        "l1": np.abs(p - q).sum(-1),
        "lk": -np.log(alpha),
        "lk_hybrid": weight * kl(p, q) + (1 - weight) * (1 - alpha),
    }


@pytest.mark.parametrize("name", sorted(divergence.NAMES))
def test_a_divergence_is_its_formula(name):
    options = {"scale": 0.8, "eta": 2.0} if name == "lk_hybrid" else {}
    found = divergence.NAMES[name](jnp.asarray(Q), jnp.asarray(P), **options)
    np.testing.assert_allclose(found, statements()[name], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(divergence.NAMES[name](jnp.asarray(P), jnp.asarray(P)), 0, atol=1e-6)


def test_cross_entropy_is_its_formula():
    labels = np.array([0, 3, 6, 2, 2])
    found = divergence.cross_entropy(jnp.asarray(Q), jnp.asarray(labels))
    np.testing.assert_allclose(found, -np.log(law(Q)[np.arange(5), labels]), rtol=1e-5)


INF = np.inf
EDGES = {
    "q has a point": ([0, -INF, -INF], [1.0, 2.0, 3.0]),
    "p has a point": ([1.0, 2.0, 3.0], [-INF, 0, -INF]),
    "the same point": ([0, -INF, -INF], [5.0, -INF, -INF]),
    "different points": ([0, -INF, -INF], [-INF, 0, -INF]),
    "overlap in one": ([0, 1.0, -INF], [-INF, 0, 1.0]),
    "q underflows": ([0, -500.0, 500.0], [0.0, 0.0, 0.0]),
    "p underflows": ([0, 0.0, 0.0], [0, -500.0, 500.0]),
    "equal": ([1.0, 1.0, 1.0], [2.0, 2.0, 2.0]),
}


@pytest.mark.parametrize("case", EDGES)
@pytest.mark.parametrize("name", [*sorted(divergence.NAMES), "ce"])
def test_values_and_gradients_are_finite_at_the_edges(case, name):
    q, p = (jnp.array(z, jnp.float32) for z in EDGES[case])
    of = (
        (lambda z: divergence.cross_entropy(z, jnp.int32(1)))
        if name == "ce"
        else lambda z: divergence.NAMES[name](z, p)
    )
    value, gradient = jax.value_and_grad(of)(q)
    assert np.isfinite(value) and value >= -1e-6
    assert np.isfinite(gradient).all()
    assert (np.asarray(gradient)[~np.isfinite(q)] == 0).all()


@pytest.mark.parametrize("name", sorted(divergence.NAMES))
def test_gradients_are_those_of_the_formula(name):
    """Central differences in float64 of the statement above; no gradient on the target's side."""
    of = divergence.NAMES[name]
    target = jax.grad(lambda p: of(jnp.asarray(Q[0]), p))(jnp.asarray(P[0]))
    np.testing.assert_array_equal(target, 0)
    if name == "lk_hybrid":  # its weight is held fixed
        return
    found = jax.grad(lambda q: of(q, jnp.asarray(P[0])))(jnp.asarray(Q[0]))

    def stated(q):
        q, p = law(q), law(P[0])
        m, alpha = (p + q) / 2, np.minimum(p, q).sum(-1)
        tv = np.abs(p - q).sum() / 2
        by_name = {"forward_kl": kl(p, q), "reverse_kl": kl(q, p), "jsd": (kl(p, m) + kl(q, m)) / 2}
        return (by_name | {"tv": tv, "l1": 2 * tv, "lk": -np.log(alpha)})[name]

    steps = 1e-6 * np.eye(7)
    expected = [(stated(Q[0] + s) - stated(Q[0] - s)) / 2e-6 for s in steps]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


def test_the_hybrid_holds_its_weight_fixed():
    q, p = jnp.asarray(Q[0]), jnp.asarray(P[0])
    alpha = float(np.exp(divergence.log_overlap(q, p)))
    weight = np.exp(-3 * alpha)
    parts = [jax.grad(lambda z, f=f: f(z, p))(q) for f in (divergence.forward_kl, divergence.total_variation)]
    found = jax.grad(lambda z: divergence.lk_hybrid(z, p))(q)
    np.testing.assert_allclose(found, weight * parts[0] + (1 - weight) * parts[1], rtol=1e-4, atol=1e-6)
