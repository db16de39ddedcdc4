"""The classical rule against its exact law, counted together with the draft."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import noise
from spec_jax.sampling.settings import Sampling
from spec_jax.tree import Law
from spec_jax.verify.rejection import point_mass, rejection
from tests.faults.lawkit import P, Q
from tests.faults.laws import fit
from tests.verify import exact
from tests.verify.drawn import cells, joint, once
from tests.verify.walks import draft, keys, scores

V, ROWS = 5, 100_000
SIBLINGS = (-1, 0, 0)
LAWS = {
    "adversarial": (P, Q),
    "random": tuple(np.random.default_rng(3).dirichlet(np.ones(V), 2)),
    "holes": ([0.5, 0, 0.5, 0, 0], [0.1, 0.3, 0.1, 0.5, 0]),
    "disjoint": ([0.5, 0.5, 0, 0, 0], [0, 0, 0.2, 0.3, 0.5]),
    "equal": (P, P),
}


def outcomes(p, q, tries):
    """The exact law of (drafted tokens, first emitted token): siblings one by one against what is left of p."""
    law = {}
    p, q = np.array(p, float), np.array(q, float)
    for drafted in itertools.product(range(V), repeat=tries):
        chance, left = np.prod(q[list(drafted)]), p
        for x in drafted:
            keep = min(1.0, left[x] / q[x]) if q[x] > 0 else 1.0
            law[*drafted, x] = law.get((*drafted, x), 0) + chance * keep
            chance, rest = chance * (1 - keep), np.maximum(left - q, 0)
            left = rest / rest.sum() if rest.sum() > 1e-12 else left
        for token in range(V):
            law[*drafted, token] = law.get((*drafted, token), 0) + chance * left[token]
    return {cell: chance for cell, chance in law.items() if chance > 1e-15}


@jax.jit
def trials(p, q, keys):
    """Drafted siblings and the first emitted token, of a row per key."""

    def one(key):
        gumbel = lambda i: noise.gumbel(noise.stream(key, "draft"), jnp.int32(4), jnp.arange(V) + i * V)  # noqa: E731
        drafted = jnp.stack([jnp.argmax(jnp.log(q) + gumbel(i)) for i in range(2)])
        tokens, law = jnp.concatenate([jnp.zeros(1, int), drafted]), jnp.tile(jnp.log(q), (3, 1))
        d = draft(tokens, SIBLINGS, law=law, proposal="sampled")
        v = rejection(key, d, scores(jnp.tile(jnp.log(p), (3, 1)), Sampling(temperature=1.0)), 2)
        return jnp.concatenate([drafted, v.tokens[:1]])

    return jax.vmap(one)(keys)


@pytest.mark.parametrize("name", LAWS)
def test_siblings_by_enumeration(name):
    p, q = LAWS[name]
    law = outcomes(p, q, 2)
    marginal = np.zeros(V)
    for cell, chance in law.items():
        marginal[cell[-1]] += chance
    np.testing.assert_allclose(marginal, p, atol=1e-12)
    texts = np.asarray(trials(jnp.array(p), jnp.array(q), keys(ROWS)))
    assert fit(texts, law).ok


def test_the_second_sibling_must_meet_the_residual():
    """The gate sees a rule that tries the second sibling against the whole of p."""
    law = outcomes(P, Q, 2)
    wrong = {}
    for drafted in itertools.product(range(V), repeat=2):
        alone = [outcomes(P, Q, 1).get((x, x), 0) / Q[x] for x in drafted]
        for token in range(V):
            first, second = (token == x for x in drafted)
            rest = np.maximum(np.array(P) - Q, 0) / np.maximum(np.array(P) - Q, 0).sum()
            chance = alone[0] * first + (1 - alone[0]) * (alone[1] * second + (1 - alone[1]) * rest[token])
            wrong[*drafted, token] = Q[drafted[0]] * Q[drafted[1]] * chance
    wrong = {cell: chance for cell, chance in wrong.items() if chance > 0}
    texts = np.asarray(trials(jnp.array(P), jnp.array(Q), keys(ROWS)))
    assert fit(texts, law).ok and not fit(texts, wrong).ok


BUSHY = (-1, 0, 0, 1, 1)
SMALL = tuple(np.random.default_rng(8).dirichlet(np.full(3, 0.7), (2, 4)))


@pytest.mark.parametrize("proposal", ["sampled", "without_replacement"])
def test_trees_by_enumeration(proposal):
    """Two children under the root and under its first child: what is drafted and what is emitted."""
    p, q = (exact.tables(rows, 3) for rows in SMALL)
    law = joint(BUSHY, p, q, proposal == "sampled", exact.by_rejection, 3)
    assert fit(cells(*once(rejection, BUSHY, proposal, *SMALL, keys(ROWS))), law).ok


def test_a_law_that_its_elder_siblings_used_up():
    """A support of two tokens and three siblings without repeats: the third is not there."""
    p, q = np.tile([0.2, 0.3, 0.5], (4, 1)), np.tile([0.4, 0.6, 0], (4, 1))
    law = joint((-1, 0, 0, 0), *(exact.tables(rows, 3) for rows in (p, q)), False, exact.by_rejection, 2)
    got = cells(*once(rejection, (-1, 0, 0, 0), "without_replacement", p, q, keys(ROWS), m=2))
    assert (got[:, 2] == -1).all() and fit(got, law).ok


@functools.partial(jax.jit, static_argnums=0)
def verdicts(rule, d, s, keys):
    return jax.vmap(lambda key: rule(key, d, s, 2))(keys)


MANY, FLAT = keys(50_000), np.zeros((2, V))


@pytest.mark.parametrize("token", range(V))
def test_point_mass(token):
    """Whatever the token; the law that the draft states is not looked at."""
    d = draft([0, token], (-1, 0), law=FLAT, proposal="sampled")
    v = verdicts(point_mass, d, scores(np.log(np.tile(P, (2, 1))), Sampling(temperature=1.0)), MANY)
    assert fit(np.asarray(v.tokens[:, :1]), {(x,): p for x, p in enumerate(P)}).ok
    assert abs(v.accepted.mean() - P[token]) < 4 * (0.25 / len(MANY)) ** 0.5


def test_point_mass_on_a_tree_of_siblings():
    """A chosen tree, a repeated token in it: a path is accepted with its own chance, and the text has p's law."""
    p = exact.tables(SMALL[0], 3)
    logits = np.log(np.pad(SMALL[0], ((0, 0), (0, 1)), constant_values=1e-30))
    tokens, parents = [3, 0, 2, 0, 1], (-1, 0, 0, 0, 1)
    s = scores(logits[tokens], Sampling(temperature=1.0))
    v = jax.jit(jax.vmap(lambda key: point_mass(key, draft(tokens, parents), s, 3)))(MANY)
    emissions = {(x,): p(())[x] for x in (1,)}
    emissions |= {(2, x): p(())[2] * p((2,))[x] for x in range(3)}
    emissions |= {(0, x): p(())[0] * p((0,))[x] for x in (0, 2)}
    emissions |= {(0, 1, x): p(())[0] * p((0,))[1] * p((1,))[x] for x in range(3)}
    got = np.where(np.arange(3) <= v.accepted[:, None], v.tokens, -1)
    assert fit(got, emissions).ok


@pytest.mark.parametrize("own", [True, False])
def test_point_mass_takes_coupled_drafts(own, monkeypatch):
    """Chosen by the position's noise. A rule without noise of its own would emit another law."""
    if not own:
        monkeypatch.setattr(noise, "stream", lambda key, name: key)
    p, q = LAWS["random"]
    s = scores(np.log(np.tile(p, (2, 1))), Sampling(temperature=1.0))

    def one(key):
        token = jnp.argmax(jnp.log(q) + noise.gumbel(key, jnp.asarray(s.position), jnp.arange(V)))
        return point_mass(key, draft(jnp.stack([0, token]), (-1, 0)), s, 2).tokens[:1]

    assert fit(np.asarray(jax.jit(jax.vmap(one))(MANY)), {(x,): chance for x, chance in enumerate(p)}).ok == own


POINT = draft([0, 3], (-1, 0))
COUPLED = draft([0, 3], (-1, 0), law=FLAT, proposal="coupled")


@pytest.mark.parametrize("given", [POINT, COUPLED, POINT.replace(proposal="sampled")])
def test_a_draft_that_was_not_drawn_is_refused(given):
    takes = "takes a 'sampled' or 'without_replacement' one with the law"
    with pytest.raises(ValueError, match=f"draft: got a '{given.proposal}' draft(| without a law), {takes}"):
        rejection(noise.request_key(0), given, scores(np.zeros((2, V)), Sampling(temperature=1.0)), 2)


def test_the_bias_that_the_refusal_prevents():
    """The likeliest token of q as the draft, said to be a draw from q: the first token has another law."""
    p, q = LAWS["random"]
    best = int(np.argmax(q))
    forced = draft([0, best], (-1, 0), law=np.log(np.tile(q, (2, 1))), proposal="sampled")
    s = scores(np.log(np.tile(p, (2, 1))), Sampling(temperature=1.0))
    biased, right = (np.asarray(verdicts(rule, forced, s, MANY).tokens[:, :1]) for rule in (rejection, point_mass))
    law = {(v,): chance for v, chance in enumerate(p)}
    assert fit(right, law).ok
    found = fit(biased, law)
    assert not found.ok and found.distance > 0.05


@pytest.mark.parametrize("rule", [rejection, point_mass])
def test_greedy_rows_take_the_likeliest_token(rule):
    logits = np.array([[0, 3, 1, 0, 0], [5, 0, 0, 0, 0]])
    for token, accepted in ((1, 1), (2, 0)):
        one_hot = np.where(np.arange(V) == token, 0, -np.inf)
        d = draft([0, token], (-1, 0), law=np.tile(one_hot, (2, 1)), proposal="sampled")
        v = verdicts(rule, d, scores(logits), MANY)
        assert (v.accepted == accepted).all()
        assert (v.tokens[:, : accepted + 1] == jnp.array([1, 0])[: accepted + 1]).all()


def test_law_over_some_ids():
    """A law given for some tokens only is zero for the rest; unused columns have no mass."""
    ids = jnp.array([[0, 0, 0], [4, 1, -1]])
    logs = jnp.log(jnp.array([[1.0, 0, 0], [0.75, 0.25, 0]]))
    with np.errstate(divide="ignore"):
        dense = draft([0, 4], (-1, 0), law=np.log([[1, 0, 0, 0, 0], [0, 0.25, 0, 0, 0.75]]), proposal="sampled")
    sparse = dense.replace(law=Law(logs, ids))
    s = scores(np.log(np.tile(P, (2, 1))), Sampling(temperature=1.0))
    got, want = verdicts(rejection, sparse, s, MANY), verdicts(rejection, dense, s, MANY)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert 0 < got.accepted.mean() < 1


@pytest.mark.parametrize("bad", [np.nan, -np.inf, np.inf, np.where(np.arange(V) == 1, np.inf, 0.0)], ids=str)
@pytest.mark.parametrize("rule", [rejection, point_mass])
def test_invalid_logits_give_no_token(rule, bad):
    d = draft([0, 2], (-1, 0), law=FLAT, proposal="sampled")
    v = verdicts(rule, d, scores(np.full((2, V), bad), Sampling(temperature=1.0)), MANY)
    assert (v.next_token == -1).all() and (v.accepted == 0).all()
