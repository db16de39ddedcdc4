"""Certificates against all drafters: random search never beats them, and the nearest rejected law attains them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from spec_jax.verify import certificates
from spec_jax.verify.acceptable import Acceptable

V = 6
RULES = {
    "greedy": None,
    "additive": Acceptable(gap=0.15),
    "multiplicative": Acceptable(log_gap=0.7),
    "top-m": Acceptable(top_k=3),
    "entropy-thresholded": Acceptable(epsilon=0.3, delta=0.6),
    "entropy gate": Acceptable(top_k=2, min_entropy=1.2),
}
least = jax.jit(certificates.kl_to_reject, static_argnums=(2, 3))
nearest = jax.jit(certificates.nearest_rejected, static_argnums=(2, 3))
accepted_by = jax.jit(certificates.accepted_by, static_argnums=1)
certified = jax.jit(certificates.certified, static_argnums=(3, 4))


def kl(p, q):
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(p > 0, p * np.log(p / q), 0.0).sum(-1)


def distance(p, q, reverse):
    return kl(q, p) if reverse else kl(p, q)


def misses(q, accepted, m):
    """Whether m refused tokens come strictly before every accepted one, for each row of q."""
    return (np.where(accepted, -1.0, q) > np.where(accepted, q, -1.0).max(-1, keepdims=True)).sum(-1) >= m


def laws(seed, sharpness=1.0):
    return np.random.default_rng(seed).dirichlet(np.full(V, sharpness)).astype(np.float32)


def cases():
    return [(name, m, reverse) for name in RULES for m in (1, 2, 3) for reverse in (False, True)]


@pytest.mark.parametrize(("name", "m", "reverse"), cases())
@given(seed=st.integers(0, 2**20))
@settings(max_examples=12)
def test_no_draft_that_is_refused_is_nearer(name, m, reverse, seed):
    """All over the simplex, around p, and around the nearest law itself."""
    p = laws(seed)
    accepted = np.asarray(accepted_by(p, RULES[name]))
    bound = float(least(p, accepted, m, reverse))
    rng, p = np.random.default_rng(seed), p.astype(np.float64)
    starts = [rng.dirichlet(np.ones(V), 3000), p * np.exp(rng.normal(0, 1, (3000, V)))]
    if np.isfinite(bound):
        q = np.asarray(nearest(p.astype(np.float32), accepted, m, reverse), np.float64)
        scale = 10.0 ** rng.uniform(-4, 0, (3000, 1))
        starts.append(np.maximum(q, 1e-12) * np.exp(scale * rng.normal(0, 1, (3000, V))))
    q = np.concatenate(starts)
    q /= q.sum(-1, keepdims=True)
    refused = misses(q, accepted, m)
    assert (distance(p, q[refused], reverse) >= bound - 2e-6).all()
    if not np.isfinite(bound):
        assert not refused.any()
    some = q[:: len(q) // 20].astype(np.float32)
    for x, far in zip(some, distance(p, some.astype(np.float64), reverse), strict=True):
        if abs(far - bound) > 2e-6:
            assert certified(p.astype(np.float32), x, accepted, m, reverse) == (far < bound)


@pytest.mark.parametrize(("name", "m", "reverse"), cases())
@given(seed=st.integers(0, 2**20))
@settings(max_examples=25)
def test_the_nearest_rejected_law_attains_it(name, m, reverse, seed):
    p = laws(seed)
    accepted = np.asarray(accepted_by(p, RULES[name]))
    bound, q = float(least(p, accepted, m, reverse)), np.asarray(nearest(p, accepted, m, reverse), np.float64)
    if not np.isfinite(bound):
        assert (~accepted).sum() < m and np.isnan(q).all()
        return
    assert q.min() >= 0 and abs(q.sum() - 1) < 1e-6
    assert abs(distance(p.astype(np.float64), q, reverse) - bound) < 2e-6
    tilted = np.where(accepted, q * (1 - 1e-5), q)
    assert misses(tilted / tilted.sum(), accepted, m)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("m", [1, 2, 3])
def test_against_a_solver(m, reverse):
    """The convex programme as a solver finds it, over every choice of the m refused tokens."""
    for seed in range(6):
        p = laws(seed, 2.0)
        accepted = np.asarray(accepted_by(p, Acceptable(top_k=2) if seed % 2 else None))
        best, p64 = np.inf, p.astype(np.float64)
        for chosen in itertools.combinations(np.flatnonzero(~accepted), m):
            pairs = [(a, y) for a in np.flatnonzero(accepted) for y in chosen]
            bounds = [{"type": "ineq", "fun": lambda q, a=a, y=y: q[y] - q[a]} for a, y in pairs]
            found = minimize(
                lambda q, p=p64: distance(p, q, reverse),
                np.full(V, 1 / V),
                constraints=[*bounds, {"type": "eq", "fun": lambda q: q.sum() - 1}],
                bounds=[(1e-9, 1)] * V,
                options={"maxiter": 200, "ftol": 1e-12},
            )
            best = min(best, found.fun if found.success else np.inf)
        assert abs(best - float(least(p, accepted, m, reverse))) < 1e-5


def test_closed_forms_of_two_tokens():
    """Strict greedy: the pool is the two best; (p1 + p2) / 2 forward, (sqrt p1 - sqrt p2)^2 in reverse."""
    p = np.array([0.2, 0.45, 0.05, 0.3], np.float32)
    accepted = accepted_by(p, None)
    forward = 0.45 * np.log(0.45 / 0.375) + 0.3 * np.log(0.3 / 0.375)
    assert abs(float(least(p, accepted, 1, False)) - forward) < 1e-7
    assert abs(float(least(p, accepted, 1, True)) + np.log(1 - (0.45**0.5 - 0.3**0.5) ** 2)) < 1e-7
    np.testing.assert_allclose(nearest(p, accepted, 1, False), [0.2, 0.375, 0.05, 0.375], atol=1e-7)


@given(seed=st.integers(0, 2**20), reverse=st.booleans())
@settings(max_examples=30)
def test_relaxing_and_wider_trees_widen_the_region(seed, reverse):
    p = laws(seed)
    strict = accepted_by(p, None)
    tree = [float(least(p, strict, m, reverse)) for m in (1, 2, 3)]
    top = [float(least(p, accepted_by(p, Acceptable(top_k=k)), 1, reverse)) for k in (1, 2, 3)]
    assert tree[0] <= tree[1] + 1e-6 <= tree[2] + 2e-6 and top[0] <= top[1] + 1e-6 <= top[2] + 2e-6
    assert tree[0] == top[0]


def test_where_nothing_can_be_refused():
    p = np.array([0.5, 0.3, 0.2, 0.0], np.float32)
    everything, some = np.ones(4, bool), np.array([1, 1, 1, 0], bool)
    for reverse in (False, True):
        assert least(p, everything, 1, reverse) == np.inf and np.isnan(nearest(p, everything, 1, reverse)).all()
        assert least(p, np.array([1, 1, 1, 0], bool), 2, reverse) == np.inf
    assert least(p, some, 1, True) == np.inf
    assert abs(float(least(p, some, 1, False)) - kl(p, np.array([0.8 / 3, 0.8 / 3, 0.2, 0.8 / 3]))) < 2e-6
    with pytest.raises(ValueError, match="m: got 5, takes 1 .. 4"):
        certificates.kl_to_reject(jnp.asarray(p), jnp.asarray(some), 5)


def test_ties_are_refused_for_nothing():
    p = np.array([0.4, 0.4, 0.2], np.float32)
    for reverse in (False, True):
        assert least(p, accepted_by(p, None), 1, reverse) == 0
        assert least(p, accepted_by(p, Acceptable(log_gap=0.1)), 1, reverse) > 0


def with_margin(rng, margin, m, n):
    """Random laws whose likeliest token is `margin` above the (m + 1)-th."""
    low = rng.uniform(0, (1 - margin) / (m + 1), n)
    between = low[:, None] + margin * rng.uniform(0, 1, (n, m - 1)) * 10.0 ** rng.uniform(-3, 0, (n, 1))
    rest = 1 - (2 * low + margin + between.sum(-1))
    fits = rest >= 0
    low, between, rest = low[fits], between[fits], rest[fits]
    p = np.concatenate([(low + margin)[:, None], between, low[:, None], np.repeat(rest[:, None] / 8, 8, 1)], 1)
    return p[rest <= 8 * low].astype(np.float32)


@functools.partial(jax.jit, static_argnums=(1, 2))
def greedy_bounds(p, m, reverse):
    return jax.vmap(lambda x: certificates.kl_to_reject(x, certificates.accepted_by(x), m, reverse))(p)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("margin", [0.01, 0.2, 0.6, 0.95])
def test_margin_bound(margin, m, reverse):
    """No law with that margin has a lower certificate, and one has it."""
    bound = float(certificates.margin_bound(margin, m, reverse))
    p = with_margin(np.random.default_rng(m), margin, m, 20_000)
    assert len(p) > 100
    assert np.asarray(greedy_bounds(p, m, reverse)).min() >= bound - 1e-6
    k, d = m - 1, margin
    if reverse:
        both = (1 + np.sqrt(1 + k * (k + 2) * d * d)) / (k + 2)
        sharp = np.array([(both + d) / 2, *[(both**2 - d**2) / (2 * both)] * k, (both - d) / 2], np.float32)
    else:
        y = (k * d + np.sqrt(k * k * d * d + 4 * (1 - d * d))) / (2 * (1 - d))
        sharp = np.array([y, *[1] * k, 1 / y], np.float32)
        sharp /= sharp.sum()
    assert abs(sharp.sum() - 1) < 1e-6 and abs(sharp[0] - sharp[-1] - margin) < 1e-6
    padded = np.concatenate([sharp, np.zeros(8, np.float32)])[None]
    assert abs(float(greedy_bounds(padded, m, reverse)[0]) - bound) < 2e-6
    if m == 1:
        d = margin
        want = -np.log(1 - d * d) / 2 if reverse else ((1 + d) * np.log(1 + d) + (1 - d) * np.log(1 - d)) / 2
        assert abs(bound - want) < 1e-6


@given(seed=st.integers(0, 2**20), reverse=st.booleans(), name=st.sampled_from(sorted(RULES)))
@settings(max_examples=60)
def test_margin_bound_holds_for_every_rule(seed, reverse, name):
    p = laws(seed)
    accepted = np.asarray(accepted_by(p, RULES[name]))
    if not accepted.all():
        margin = float(p.max() - p[~accepted].max())
        assert float(least(p, accepted, 1, reverse)) >= float(certificates.margin_bound(margin, 1, reverse)) - 1e-6
