"""Relaxed rules: strict at their zero point, the law they promise elsewhere, and never in use unless asked for."""

import ast
import dataclasses
import functools
import inspect
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_jax import configs, noise
from spec_jax.engine.engine import Engine
from spec_jax.engine.requests import request
from spec_jax.models.toy import AuditTarget, audit_table
from spec_jax.sampling.constraint import from_transitions
from spec_jax.sampling.settings import Sampling
from spec_jax.verify.acceptable import Acceptable, LinearHead
from spec_jax.verify.match import match
from spec_jax.verify.rejection import point_mass, rejection
from spec_jax.verify.relaxed import Relaxed
from tests.configs.targets import NETWORK, build
from tests.faults import kit
from tests.faults.drafters import Follow
from tests.faults.lawkit import P, Q
from tests.faults.laws import fit
from tests.faults.test_d15_audit import digest
from tests.verify.test_match import M, N, V, trees
from tests.verify.walks import draft, keys, scores

ROOT = Path(__file__).parents[2]
SAMPLED = Sampling(temperature=0.8, top_k=4, presence_penalty=0.5)
GREEDY = Sampling()
ZERO = {
    "nothing set": Relaxed(),
    "specdec": Relaxed.specdec(3, 0.0),
    "specdec, beta": Relaxed.specdec(0, 2.0),
    "typical": Relaxed.typical(1.0, math.inf),
    "top": Relaxed.top(0),
    "additive": Relaxed.additive(0.0),
    "multiplicative": Relaxed.multiplicative(1.0),
    "margin": Relaxed.margin(0.0),
    "entropy": Relaxed.entropy(math.log(V) + 0.1, V),
    "judge": Relaxed.judged(LinearHead((5.0, -3.0), threshold=1.0)),
    "lenient": Relaxed.lenient(1.0),
    "lenient, point mass": Relaxed.lenient(1.0, "point_mass"),
    "blend": Relaxed.blend(1.0),
    "blend by a function": Relaxed.blend(lambda features, p, q: jnp.float32(1.0)),
}
STRICT = {"match": match, "rejection": rejection, "point_mass": point_mass}


@functools.cache
def verdicts_of(rule):
    return jax.jit(jax.vmap(lambda key, d, s: rule(key, d, s, M), (0, None, None)))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ZERO)
@given(tree=trees(), seed=st.integers(0, 2**16))
@settings(max_examples=15)
def test_zero_point_is_the_strict_rule(name, sampling, tree, seed):
    rng, relaxed = np.random.default_rng(seed), ZERO[name]
    logits = np.round(rng.normal(0, 2, (N, V)))  # whole numbers: some tie
    law = np.log(rng.dirichlet(np.ones(V), N))
    d = draft(*tree, law=law, proposal="sampled")
    s = scores(logits, sampling, want_log_probs=True, features=jnp.asarray(rng.normal(0, 1, (N, 2)), jnp.float32))
    got, want = (verdicts_of(rule)(keys(20, seed), d, s) for rule in (relaxed, STRICT[relaxed.strict]))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_top_one_is_strict_on_greedy_rows():
    d, logits = (
        draft([0, 1, 2, 3, 4, 0, 1, 2], [-1, 0, 0, 0, 0, 1, 2, 3]),
        np.random.default_rng(0).normal(0, 1, (N, V)),
    )
    got, want = (verdicts_of(rule)(keys(1), d, scores(logits)) for rule in (Relaxed.top(1), match))
    jax.tree.map(np.testing.assert_array_equal, got, want)


LAW = [0.4, 0.3, 0.15, 0.1, 0.05]
H = -sum(p * math.log(p) for p in LAW)
SETS = [
    (Relaxed.top(2), {0, 1}),
    (Relaxed.specdec(3, math.log(0.4 / 0.3) + 1e-3), {0, 1}),
    (Relaxed.specdec(1, 5.0), {0}),
    (Relaxed.additive(0.26), {0, 1, 2}),
    (Relaxed.multiplicative(0.24), {0, 1, 2, 3}),
    (Relaxed.margin(0.3), {0, 1}),
    (Relaxed.margin(0.28), {0}),
    (Relaxed.typical(0.12, math.inf), {0, 1, 2}),
    (Relaxed.typical(0.12, 0.09 * math.exp(H)), {0, 1, 2, 3}),
    (Relaxed.entropy(H - 1e-3, 4), {0, 1, 2, 3}),
    (Relaxed.entropy(H + 1e-3, 4), set()),
]


@pytest.mark.parametrize(("rule", "passes"), SETS, ids=range(len(SETS)))
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.5])
def test_what_passes(rule, passes, temperature):
    """A greedy row is judged by softmax of its logits, a sampled one by its own law: here the same."""
    mask = rule.accepts.mask(jnp.log(jnp.array(LAW)))
    assert set(np.flatnonzero(mask)) == passes
    logits = np.log(np.tile(LAW, (2, 1))) * (temperature or 1.0)
    for token in range(V):
        s = scores(logits, Sampling(temperature=temperature))
        v = verdicts_of(rule)(keys(50), draft([0, token], (-1, 0)), s)
        own = verdicts_of(match)(keys(50), draft([0, token], (-1, 0)), s)
        assert (v.accepted == (True if token in passes else own.accepted)).all()
        assert (v.tokens[:, 0] == jnp.where(v.accepted == 1, token, own.tokens[:, 0])).all()


@given(seed=st.integers(0, 2**16), k=st.integers(0, V), ties=st.booleans())
@settings(max_examples=50)
def test_a_condition_refuses_a_lower_level_set(seed, k, ties):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(V))
    p = np.round(p * 8) / 8 if ties else p
    for accepts in (Acceptable(k, 0.7), Acceptable(None, 1.0, 0.3), Acceptable(4, epsilon=0.2, delta=0.5)):
        mask = np.asarray(accepts.mask(jnp.log(jnp.asarray(p, jnp.float32))))
        assert p[mask].min(initial=1.0) >= p[~mask].max(initial=0.0) or not mask.any()
        assert accepts.top_k is None or mask.sum() <= accepts.top_k


def test_the_targets_own_choice_goes_before_elder_children():
    logits = np.log(np.tile(LAW, (5, 1)))
    d = draft([0, 1, 0, 2, 3], (-1, 0, 0, 1, 2))
    v = verdicts_of(Relaxed.top(2))(keys(1), d, scores(logits))
    assert v.path[0].tolist()[:2] == [0, 2] and v.tokens[0].tolist()[:2] == [0, 0] and v.accepted[0] == 1
    v = verdicts_of(Relaxed.top(4))(keys(1), draft([0, 1, 2, 2, 3], (-1, 0, 0, 1, 3)), scores(logits))
    assert v.tokens[0].tolist() == [1, 2, 3, 0, 0] and v.path[0].tolist() == [0, 1, 3, 4, 0]


@functools.partial(jax.jit, static_argnums=0)
def trials(rule, p, q, keys):
    """The first token of drafts of two siblings drawn from q, in a row per key."""

    def one(key):
        gumbel = lambda i: noise.gumbel(noise.stream(key, "draft"), jnp.int32(4), jnp.arange(V) + i * V)  # noqa: E731
        drafted = jnp.stack([jnp.argmax(jnp.log(q) + gumbel(i)) for i in range(2)])
        tokens, law = jnp.concatenate([jnp.zeros(1, int), drafted]), jnp.tile(jnp.log(q), (3, 1))
        d = draft(tokens, (-1, 0, 0), law=law, proposal="sampled")
        v = rule(key, d, scores(jnp.tile(jnp.log(p), (3, 1)), Sampling(temperature=1.0)), 2)
        return v.tokens, v.accepted

    return jax.vmap(one)(keys)


MANY = keys(100_000)


@pytest.mark.parametrize("w", [0.0, 0.3, 0.8])
def test_a_blend_has_the_blends_law(w):
    p, q = np.array(P), np.array(Q)
    for weight in (w, lambda features, p, q: jnp.float32(w)):
        tokens, accepted = trials(Relaxed.blend(weight), jnp.array(p), jnp.array(q), MANY)
        assert fit(np.asarray(tokens[:, :1]), {(x,): w * p[x] + (1 - w) * q[x] for x in range(V)}).ok
        assert w > 0 or (accepted == 1).all()
        bonus = np.asarray(tokens[accepted == 1, 1:])
        assert fit(bonus, {(x,): p[x] for x in range(V)}).ok


def test_a_weight_may_depend_on_both_laws():
    p, q = np.array(P), np.array(Q)
    overlap = np.minimum(p, q).sum()
    rule = Relaxed.blend(lambda features, p, q: jnp.minimum(p, q).sum())
    tokens, _ = trials(rule, jnp.array(p), jnp.array(q), MANY)
    assert fit(np.asarray(tokens[:, :1]), {(x,): overlap * p[x] + (1 - overlap) * q[x] for x in range(V)}).ok


@pytest.mark.parametrize("l", [0.8, 0.4, 0.1])
def test_lenience_emits_no_token_more_than_its_share(l):  # noqa: E741
    p, q = np.array(P), np.array(Q)
    tokens, accepted = trials(Relaxed.lenient(l), jnp.array(p), jnp.array(q), MANY)
    strict = trials(rejection, jnp.array(p), jnp.array(q), MANY)[1]
    share = np.bincount(tokens[:, 0], minlength=V) / len(MANY)
    assert (share <= p / l + 4 * np.sqrt(0.25 / len(MANY))).all()
    assert (accepted >= strict).all() and accepted.mean() > strict.mean()
    chain = draft([0, 0], (-1, 0), law=np.log(np.tile(Q, (2, 1))), proposal="sampled")
    v = verdicts_of(Relaxed.lenient(l))(MANY, chain, scores(np.log(np.tile(P, (2, 1))), Sampling(temperature=1.0)))
    assert abs(v.accepted.mean() - min(1, p[0] / (l * q[0]))) < 4 * np.sqrt(0.25 / len(MANY))


def test_a_judge_looks_at_the_drafted_tokens_features():
    rule = Relaxed.judged(LinearHead((1.0, 0.0)))
    logits = np.log(np.tile(LAW, (4, 1)))
    features = jnp.array([[9.0, 0], [-1, 0], [1, 0], [-1, 0]])
    d = draft([0, 3, 4, 3], (-1, 0, 0, 2))
    v = verdicts_of(rule)(keys(1), d, scores(logits, features=features))
    assert v.path[0].tolist()[:2] == [0, 2] and v.tokens[0].tolist()[:3] == [4, 0, 0] and v.accepted[0] == 1
    assert LinearHead((1.0, 2.0), bias=-1.0).chance(jnp.array([[1.0], [0.5]])) == jax.nn.sigmoid(1.0)
    with pytest.raises(ValueError, match="judge: got a target without features"):
        rule(keys(1)[0], d, scores(logits), 3)
    with pytest.raises(ValueError, match="weight: got 2 numbers, takes one for each of 3"):
        LinearHead((1.0, 2.0))(jnp.zeros(3))


def test_a_judge_in_an_engine_sees_the_nodes_of_the_target():
    """The audit target's feature is a hash of the text: wrong drafts pass where it is above 48."""
    prompts, rule = [[r % 8, 3, r % 5] for r in range(20)], Relaxed.judged(LinearHead((1.0,), bias=-48.5))
    e = dataclasses.replace(kit.engine(Follow(1, kit.WORDS), log_probs=False, rule=rule), target=AuditTarget(kit.WORDS))
    table = audit_table(kit.WORDS)
    own = [int(np.argmax(table[digest(p)])) for p in prompts]
    params = kit.engine_params(e, table, kit.plan([[*p, t] for p, t in zip(prompts, own, strict=True)], 0, 1, 20))
    state = kit.run(e, params, kit.batch([request(e, p, 2) for p in prompts], 20), 1)
    passed = [digest([*p, (t + 1) % kit.WORDS]) > 48 for p, t in zip(prompts, own, strict=True)]
    assert state.rows.counters.accepted.tolist() == passed and 0 < sum(passed) < 20
    for row, (p, t) in enumerate(zip(prompts, own, strict=True)):
        first = (t + 1) % kit.WORDS if passed[row] else t
        assert kit.output(state, row) == [first, int(np.argmax(table[digest([*p, first])]))][: 1 + passed[row]]


EVERYTHING = {
    "top": Relaxed.top(V),
    "judge": Relaxed.judged(LinearHead((0.0,), bias=9.0)),
    "both": Relaxed("point_mass", Acceptable(top_k=V), LinearHead((0.0,), bias=9.0)),
    "blend": Relaxed.blend(0.0),
}


@pytest.mark.parametrize("name", EVERYTHING)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_may_not_come_does_not_come(name, temperature):
    """Bans, constraint and truncation hold, whatever passes otherwise."""
    logits, features = np.tile(np.log(LAW), (2, 1)), jnp.zeros((2, 1))
    bound = from_transitions(np.array([[0, -1, 0, 0, 0]]))
    settings = Sampling(temperature, top_k=4 if temperature else 0, banned_tokens=(2,))
    for token in range(V):
        d = draft([0, token], (-1, 0), law=np.log(np.full((2, V), 1 / V)), proposal="sampled")
        s = scores(logits, settings, features=features).replace(constraint=bound)
        s = s.replace(history=dataclasses.replace(s.history, state=jnp.int32(1)))
        v = verdicts_of(EVERYTHING[name])(keys(200), d, s)
        emitted = set(np.unique(v.tokens[:, 0]))
        allowed = {0, 3, 4}
        assert emitted <= allowed and ((v.accepted == 0).all() or token in allowed)
        assert token not in allowed or name == "blend" or (v.accepted == 1).all()


@pytest.mark.parametrize("bad", [np.nan, -np.inf, np.inf, np.where(np.arange(V) == 1, np.inf, 0.0)], ids=str)
@pytest.mark.parametrize("name", EVERYTHING)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_invalid_logits_give_no_token(name, bad, sampling):
    d = draft([0, 2], (-1, 0), law=np.zeros((2, V)), proposal="sampled")
    v = verdicts_of(EVERYTHING[name])(keys(5), d, scores(np.full((2, V), bad), sampling, features=jnp.zeros((2, 1))))
    assert (v.tokens[:, 0] == -1).all() and (v.accepted == 0).all()


def test_settings_that_do_not_fit_are_refused():
    for make, message in (
        (lambda: Acceptable(top_k=-1), "top_k: got -1"),
        (lambda: Acceptable(gap=-0.1), "gap: got -0.1"),
        (lambda: Acceptable(epsilon=math.nan), "epsilon: got nan"),
        (lambda: Relaxed.multiplicative(0.0), "ratio: got 0.0"),
        (lambda: Relaxed.lenient(0.0), "lenience: got 0.0"),
        (lambda: Relaxed.blend(1.5), "weight: got 1.5"),
        (lambda: Relaxed(lenience=0.5), "lenience: got 0.5 with strict 'match'"),
        (lambda: Relaxed(weight=0.5), "weight: got 0.5 with strict 'match'"),
        (lambda: Relaxed(strict="greedy"), "strict"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            make()
    for given_draft in (draft([0, 3], (-1, 0)), draft([0, 3], (-1, 0), law=np.zeros((2, V)), proposal="coupled")):
        with pytest.raises(ValueError, match="takes a 'sampled' one"):
            Relaxed.blend(0.5)(keys(1)[0], given_draft, scores(np.zeros((2, V)), Sampling(temperature=1.0)), 2)


def test_only_what_says_relaxed_is_relaxed():
    for name in set(configs.names()) - NETWORK:
        assert isinstance(build(name).rule, Relaxed) == ("relaxed" in name)
    assert Engine(AuditTarget(8), 64).rule is match


def test_nothing_imports_a_relaxed_rule_unless_it_says_so():
    users = set()
    for path in [*ROOT.glob("spec_jax/**/*.py"), *ROOT.glob("configs/*.py"), *ROOT.glob("scripts/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if "Relaxed" in names or (isinstance(node, ast.ImportFrom) and "relaxed" in (node.module or "")):
                users.add(path.stem)
    assert users and all("relaxed" in user for user in users)
    for name in users - {"relaxed"}:
        assert "RELAXED" in (ROOT / "configs" / f"{name}.py").read_text()
    assert "CHANGE the text" in inspect.getmodule(Relaxed).__doc__ and "another law" in Relaxed.__doc__
