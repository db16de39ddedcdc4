"""The rules that look at all siblings at once, against enumerations of what they are said to do."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import noise
from spec_jax.audit.transport import optimum, optimum_independent
from spec_jax.sampling.settings import Sampling
from spec_jax.verify.importance import _decide, importance
from spec_jax.verify.kseq import kseq
from spec_jax.verify.resispec import resispec
from spec_jax.verify.siblings import Siblings
from tests.faults.lawkit import P, Q
from tests.faults.laws import fit
from tests.verify.drawn import cells, once
from tests.verify.walks import draft, keys, scores

V = 5
LAWS = {
    "adversarial": (P, Q),
    "random": tuple(np.random.default_rng(3).dirichlet(np.ones(V), 2)),
    "holes": ([0.5, 0, 0.5, 0, 0], [0.1, 0.3, 0.1, 0.5, 0]),
    "disjoint": ([0.5, 0.5, 0, 0, 0], [0, 0, 0.2, 0.3, 0.5]),
    "equal": (P, P),
    "certain": ([0, 0, 0, 1, 0], [0.1, 0.1, 0.1, 0.3, 0.4]),
}
TABLES = [tuple(np.random.default_rng(i).dirichlet(np.full(V, a), 2)) for i, a in enumerate([0.2, 0.5, 1, 1, 2, 5])]
TABLES += [(np.array(p, float), np.array(q, float)) for p, q in LAWS.values()]
MANY = keys(100_000)


def bisect(holds, low, high):
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def by_kseq(p, q, k):
    """The joint law of (drafted tokens, emitted token, was it accepted)."""
    beta = lambda rho: np.minimum(q, p / rho).sum()  # noqa: E731
    rho = bisect(lambda rho: 1 - (1 - beta(rho)) ** k <= rho * beta(rho), 1, k)
    rest = p - np.minimum(q, p / rho) * (k if beta(rho) == 0 else (1 - (1 - beta(rho)) ** k) / beta(rho))
    rest = np.maximum(rest, 0)
    for drafted in itertools.product(range(V), repeat=k):
        chance = np.prod(q[list(drafted)])
        for x in drafted:
            keep = min(1, p[x] / (rho * q[x])) if q[x] > 0 else 0
            yield drafted, x, True, chance * keep
            chance *= 1 - keep
        for token in range(V):
            yield drafted, token, False, chance * rest[token] / max(rest.sum(), 1e-300)


def by_resispec(p, q, k):
    def plan(rho):
        reached, tau, capacity = [], [], rho
        missed = 1 - np.minimum(p, rho * q).sum()
        for i in range(k):
            reached.append(1.0 if i == 0 else missed + np.minimum(p, max(capacity, 0) * q).sum())
            capacity -= reached[-1]
            tau.append(capacity)
        return reached, tau

    rho = bisect(lambda rho: plan(rho)[1][-1] >= 0, 1, k)
    reached, tau = plan(rho)
    rest = np.maximum(p - rho * q, 0)
    for drafted in itertools.product(range(V), repeat=k):
        chance = np.prod(q[list(drafted)])
        for x, s, t in zip(drafted, reached, tau, strict=True):
            keep = min(1, max(p[x] - max(t, 0) * q[x], 0) / (s * q[x])) if q[x] > 0 and s > 0 else 0
            yield drafted, x, True, chance * keep
            chance *= 1 - keep
        for token in range(V):
            yield drafted, token, False, chance * rest[token] / max(rest.sum(), 1e-300)


def by_levels(p, q, k, levels, iterations):
    """Levels of all candidates by enumeration; the law of the chosen one comes out of it, not of a formula."""
    weight = np.divide(p, q, out=np.zeros(V), where=q > 0)

    def slopes(below):
        return sum(below[1:] ** i * below[:-1] ** (k - 1 - i) for i in range(k))

    def levels_of(c):
        up = [np.clip((weight - low) / max(high - low, 1e-20), 0, 1) for low, high in itertools.pairwise(c)]
        at_least = np.stack([np.ones(V), *up, np.zeros(V)])
        return at_least[:-1] - at_least[1:]

    c = slopes(np.linspace(0, 1, levels + 1))
    for _ in range(iterations if k > 1 else 0):
        c = slopes(np.concatenate([[0], np.cumsum(levels_of(c) @ q)]))
    at = levels_of(c)
    choices = {}
    for drafted in itertools.product(range(V), repeat=k):
        chance = np.prod(q[list(drafted)])
        if chance > 0:
            for levels_drawn in itertools.product(range(levels), repeat=k):
                mass = chance * np.prod([at[level, x] for level, x in zip(levels_drawn, drafted, strict=True)])
                x = drafted[int(np.argmax(levels_drawn))]
                choices[drafted, x] = choices.get((drafted, x), 0) + mass
    chosen = np.zeros(V)
    for (_, x), mass in choices.items():
        chosen[x] += mass
    rest = np.maximum(p - chosen, 0)
    for (drafted, x), mass in choices.items():
        keep = min(1, p[x] / chosen[x]) if chosen[x] > 0 else 0
        yield drafted, x, True, mass * keep
        for token in range(V):
            yield drafted, token, False, mass * (1 - keep) * rest[token] / max(rest.sum(), 1e-300)


RULES = {
    "K-SEQ": (kseq, by_kseq),
    "ResiSpec": (resispec, by_resispec),
    "importance": (
        functools.partial(importance, levels=3, iterations=5),
        functools.partial(by_levels, levels=3, iterations=5),
    ),
}


def summary(outcomes):
    marginal, accepted = np.zeros(V), 0.0
    for _, token, kept, chance in outcomes:
        marginal[token] += chance
        accepted += chance * kept
    return marginal, accepted


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("name", RULES)
def test_the_enumerated_rule_is_exact(name, k):
    for p, q in TABLES:
        marginal, _ = summary(RULES[name][1](p, q, k))
        np.testing.assert_allclose(marginal, p, atol=1e-9)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_acceptance_by_enumeration(k):
    """K-SEQ has its bound, ResiSpec beats it and rejection one by one, and enough levels reach the optimum."""
    for p, q in TABLES:
        best = optimum(p, q, k)
        seq, aware = (summary(by(p, q, k))[1] for by in (by_kseq, by_resispec))
        left, reached = p, 1.0
        for _ in range(k):
            left, reached = left - np.minimum(left, reached * q), reached - np.minimum(left, reached * q).sum()
        assert (1 - 1 / np.e) * best - 1e-9 <= seq <= aware + 1e-7
        assert 1 - reached - 1e-7 <= aware <= best + 1e-7
        if k == 2:
            assert summary(by_levels(p, q, k, 8, 40))[1] == pytest.approx(best, abs=1e-3)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("laws", ["adversarial", "random", "holes", "disjoint", "equal"])
def test_drafts_and_emissions_have_the_enumerated_law(laws, name):
    """Three siblings, duplicates among them: which are drafted, which token is emitted, and whether as a draft."""
    rule, by = RULES[name]
    p, q = (np.array(law, float) for law in LAWS[laws])
    trees, v = once(rule, (-1, 0, 0, 0), "sampled", *(np.tile(law, (V + 1, 1)) for law in (p, q)), MANY, m=2)
    got = np.concatenate([cells(trees, v)[:, :4], v.accepted[:, None]], axis=1)
    law = {}
    for drafted, token, kept, chance in by(p, q, 3):
        cell = (*drafted, token, int(kept))
        law[cell] = law.get(cell, 0) + chance
    assert fit(got, {cell: chance for cell, chance in law.items() if chance > 1e-12}).ok


def test_the_gate_tells_the_rules_apart():
    p, q = (np.array(law, float) for law in LAWS["adversarial"])
    trees, v = once(kseq, (-1, 0, 0, 0), "sampled", *(np.tile(law, (V + 1, 1)) for law in (p, q)), MANY, m=2)
    law = {}
    for drafted, token, _, chance in by_resispec(p, q, 3):
        law[*drafted, token] = law.get((*drafted, token), 0) + chance
    assert not fit(cells(trees, v)[:, :4], {cell: chance for cell, chance in law.items() if chance > 1e-12}).ok


@functools.partial(jax.jit, static_argnums=0)
def run(rule, d, s, keys):
    return jax.vmap(lambda key: rule(key, d, s, 3))(keys)


@functools.partial(jax.jit, static_argnums=3)
def chance(p, q, k, n):
    """That a sibling is accepted by the default levels: p less what the residual keeps."""
    here = jnp.arange(n) == 1
    rest = _decide(Siblings(p, q, jnp.zeros(n, jnp.int32), here, k, jnp.zeros(n)), 8, 40)[1]
    return 1 - rest.sum()


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_levels_come_close_to_the_optimum(k):
    rng, parts = np.random.default_rng(k), []
    for i in range(60):
        p, q = rng.dirichlet(np.full(V, [0.2, 0.5, 1, 2][i % 4]), 2)
        parts.append(chance(jnp.float32(p), jnp.float32(q), jnp.int32(k), 9) / optimum_independent(p, q, k))
    assert max(parts) < 1 + 1e-4 and min(parts) > 0.99 and np.mean(parts) > 0.9995


def large(seed, size=1000, k=4):
    """A star of drawn tokens over a vocabulary, for many keys; logits alike at every node."""
    rng = np.random.default_rng(seed)
    z = rng.normal(0, 2, size)
    p, q = (np.exp(x) / np.exp(x).sum() for x in (z, z + rng.normal(0, 1, size)))
    return p, q, [rng.choice(size, k, p=q) for _ in range(3000)]


def test_levels_reach_the_optimum_over_a_large_vocabulary():
    p, q, drawn = large(0)
    law = np.log(np.tile(q, (5, 1)))
    many = [draft([0, *tokens], (-1, 0, 0, 0, 0), law=law, proposal="sampled") for tokens in drawn]
    tokens = np.stack([d.tree.tokens for d in many])
    s = scores(np.log(np.tile(p, (5, 1))), Sampling(temperature=1.0))
    one = lambda key, t: importance(key, many[0].replace(tree=many[0].tree.replace(tokens=t)), s, 2).accepted  # noqa: E731
    mean = np.mean(jax.jit(jax.vmap(one))(keys(len(drawn)), tokens))
    best = optimum_independent(p, q, 4)
    assert abs(mean - best) < 4 * (best * (1 - best) / len(drawn)) ** 0.5


@pytest.mark.parametrize("rule", [kseq, resispec, importance])
def test_greedy_rows_take_the_likeliest_token(rule):
    logits = np.array([[0, 3, 1, 0, 0], [5, 0, 0, 0, 0], [0, 0, 0, 0, 2]])
    law = np.log(np.tile([0.1, 0.2, 0.3, 0.2, 0.2], (3, 1)))
    for tokens, accepted, text in (([0, 2, 1], 1, [1, 4]), ([0, 1, 3], 1, [1, 0]), ([0, 2, 3], 0, [1])):
        v = run(rule, draft(tokens, (-1, 0, 0), law=law, proposal="sampled"), scores(logits), MANY[:2000])
        assert (v.tokens[:, : accepted + 1] == np.array(text)).all() and (v.accepted == accepted).all()


@pytest.mark.parametrize("bad", [np.nan, -np.inf, np.inf, np.where(np.arange(V) == 1, np.inf, 0.0)], ids=str)
@pytest.mark.parametrize("rule", [kseq, resispec, importance])
def test_invalid_logits_give_no_token(rule, bad):
    d = draft([0, 2, 2], (-1, 0, 0), law=np.log(np.tile(Q, (3, 1))), proposal="sampled")
    v = run(rule, d, scores(np.full((3, V), bad), Sampling(temperature=1.0)), MANY[:100])
    assert (v.next_token == -1).all() and (v.accepted == 0).all()


@pytest.mark.parametrize("kind", ["point", "coupled", "without_replacement"])
@pytest.mark.parametrize("rule", [kseq, resispec, importance])
def test_other_drafts_are_refused(rule, kind):
    given = draft([0, 3], (-1, 0), law=np.zeros((2, V)), proposal=kind)
    with pytest.raises(ValueError, match=f"draft: got a '{kind}' draft, takes a 'sampled' one with the law"):
        rule(noise.request_key(0), given, scores(np.zeros((2, V)), Sampling(temperature=1.0)), 2)


@pytest.mark.parametrize("rule", [kseq, resispec, importance])
def test_the_bias_that_the_refusal_prevents(rule):
    """The likeliest tokens of q, said to be draws from it."""
    p, q = (np.array(law) for law in LAWS["random"])
    best = np.argsort(-q)[:2]
    forced = draft([0, *best], (-1, 0, 0), law=np.log(np.tile(q, (3, 1))), proposal="sampled")
    v = run(rule, forced, scores(np.log(np.tile(p, (3, 1))), Sampling(temperature=1.0)), MANY)
    found = fit(np.asarray(v.tokens[:, :1]), {(x,): chance for x, chance in enumerate(p)})
    assert not found.ok and found.distance > 0.05


def test_few_levels_are_refused():
    with pytest.raises(ValueError, match="levels, iterations: got 1, 40"):
        importance(noise.request_key(0), draft([0], (-1,)), scores(np.zeros((1, V))), 2, levels=1)
