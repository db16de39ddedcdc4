import numpy as np
import pytest

from spec_jax.audit.transport import acceptance, candidate_sets, optimum, optimum_independent
from spec_jax.verify.importance import importance
from spec_jax.verify.kseq import kseq
from spec_jax.verify.match import match
from spec_jax.verify.rejection import point_mass, rejection
from spec_jax.verify.resispec import resispec
from tests.faults.lawkit import P, Q

RNG = np.random.default_rng(5)
TABLES = {
    "adversarial": (P, Q),
    "equal": (P, P),
    "disjoint": ([0.5, 0.5, 0, 0, 0], [0, 0, 0.2, 0.3, 0.5]),
    "holes": ([0.5, 0, 0.5, 0, 0], [0.1, 0.3, 0.1, 0.5, 0]),
    "greedy": ([0, 0, 1, 0, 0], [0.1, 0.2, 0.3, 0.2, 0.2]),
    "random": tuple(RNG.dirichlet(np.ones(5), 2)),
    "sharp": tuple(RNG.dirichlet(np.full(5, 0.3), 2)),
}
ONE_BY_ONE = (rejection, kseq, resispec)


def test_candidate_sets():
    q = [0.5, 0.3, 0.2]
    assert candidate_sets(q, 2, True)[frozenset({0, 1})] == pytest.approx(2 * 0.5 * 0.3)
    assert candidate_sets(q, 2, False)[frozenset({0, 1})] == pytest.approx(0.5 * 0.3 / 0.5 + 0.3 * 0.5 / 0.7)
    assert candidate_sets([1.0, 0.0], 2, False) == {frozenset({0}): 1.0}
    for k in (1, 2, 3, 4):
        for replacement in (True, False):
            assert sum(candidate_sets(Q, k, replacement).values()) == pytest.approx(1)


@pytest.mark.parametrize("name", TABLES)
def test_the_closed_form_is_the_linear_program(name):
    p, q = TABLES[name]
    for k in (1, 2, 3, 4):
        assert optimum_independent(p, q, k) == pytest.approx(optimum(p, q, k), abs=1e-9)


def test_one_candidate_has_the_overlap_and_more_candidates_do_no_worse():
    for p, q in TABLES.values():
        assert optimum(p, q, 1) == pytest.approx(np.minimum(p, q).sum(), abs=1e-9)
        with_repeats, without = ([optimum(p, q, k, replacement) for k in (1, 2, 3)] for replacement in (True, False))
        assert (np.diff(with_repeats) > -1e-9).all()
        assert (np.array(without) > np.array(with_repeats) - 1e-9).all()


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("name", TABLES)
def test_rules_against_the_optimum(name, k):
    """No rule beats it; the two-step rule reaches it; the best of the one-by-one rules is where it should be."""
    p, q = TABLES[name]
    best = optimum(p, q, k)
    got = {rule: acceptance(rule, p, q, k, width=4) for rule in (*ONE_BY_ONE, importance)}
    error = {rule: 4 * a.standard_error + 1e-5 for rule, a in got.items()}
    for rule, a in got.items():
        assert a.chance <= best + error[rule]
    assert got[importance].chance >= 0.999 * best - error[importance]
    assert got[kseq].chance >= (1 - 1 / np.e) * best - error[kseq]
    for rule in (rejection, kseq):
        assert got[resispec].chance >= got[rule].chance - error[rule] - error[resispec]


@pytest.mark.parametrize("name", TABLES)
def test_without_replacement(name):
    p, q = TABLES[name]
    for k in (1, 2, 3, 4):
        a = acceptance(rejection, p, q, k, "without_replacement", width=4)
        assert a.chance <= optimum(p, q, k, replacement=False) + 4 * a.standard_error + 1e-5


def test_known_values():
    near = lambda a, value: abs(a.chance - value) < 4 * a.standard_error + 1e-6  # noqa: E731
    assert near(acceptance(rejection, P, Q, 1, width=4), 0.5)
    assert near(acceptance(point_mass, P, Q, 2, "point", width=4), P[0] + P[3])
    assert near(acceptance(match, P, P, 1, "coupled", width=4), 1)


def test_a_rule_that_accepts_too_often_is_seen():
    lenient = lambda key, draft, s, m: rejection(key, draft, s.replace(logits=draft.law.log_probs), m)  # noqa: E731
    a = acceptance(lenient, P, Q, 2, width=4)
    assert a.chance > optimum(P, Q, 2) + 4 * a.standard_error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.5, 0.6], [0.5, 0.5], 1), "p: got"),
        (([0.5, 0.5], [0.5, -0.5], 1), "q: got"),
        (([0.5, 0.5], [1.0], 1), "p, q: got 2 and 1 tokens"),
        ((np.full(11, 1 / 11), np.full(11, 1 / 11), 1), "p: got 11 tokens, takes at most 10"),
    ],
)
def test_wrong_laws_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        optimum(*arguments)
