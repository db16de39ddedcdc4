"""Weights, masks and normalisers against NumPy, and what must not leak from slots that do not count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.train import divergence, objective, weights
from spec_jax.train.objective import Objective
from spec_jax.train.slots import Said, Slots, expected_length

B, K, V = 3, 4, 6
RNG = np.random.default_rng(1)
LOGITS, TARGET = RNG.normal(0, 1.5, (B, K, V)).astype(np.float32), RNG.normal(0, 1.5, (B, K, V)).astype(np.float32)
LABELS = RNG.integers(0, V, (B, K))
LABELS[0] = LOGITS[0].argmax(-1)  # a block that is right throughout
LABELS[1, 1] = TARGET[1, 1].argmax()
SCORED = np.array([[1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]], bool)


def law(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def slots(logits=LOGITS, scored=SCORED, labels=LABELS, target=TARGET):
    return Slots.of(*(jnp.asarray(x) for x in (logits, labels, scored, target)))


def loops(chance, include):
    """For every block: the weights sum over j >= k of the product of the first j chances, or products before k."""
    out = np.zeros((B, K))
    for b in range(B):
        for k in range(K):
            if include == "value":
                out[b, k] = sum(np.prod(chance[b, : j + 1]) for j in range(k, K))
            else:
                out[b, k] = np.prod(chance[b, :k])
    return out


def stated():
    q, p = law(LOGITS), law(TARGET)
    rows = np.arange(B)[:, None], np.arange(K)[None], LABELS
    q_label, p_label, alpha = q[rows], p[rows], np.minimum(q, p).sum(-1)
    hit, agree = LOGITS.argmax(-1) == LABELS, TARGET.argmax(-1) == LABELS
    decay = np.broadcast_to(np.exp(-np.arange(K) / 4), (B, K))
    powers = np.broadcast_to(0.6 ** np.arange(K), (B, K))
    rank = (LOGITS > np.take_along_axis(LOGITS, LABELS[..., None], -1)).sum(-1)
    return {
        ("decay", (("gamma", 4.0),)): decay,
        ("powers", (("base", 0.6),)): powers,
        ("powers", (("base", 0.6), ("share", True))): powers / powers[0].sum(),
        ("d_pace", ()): loops(np.where(SCORED, 0.5 * q_label + 0.5, 0), "value"),
        ("d_pace", (("alpha", 0.1),)): loops(np.where(SCORED, 0.9 * q_label + 0.1, 0), "value"),
        ("expected", ()): loops(np.where(SCORED, alpha, 0), "value"),
        ("until_failure", ()): loops(np.where(SCORED, hit, 0), "before"),
        ("survival", ()): loops(np.where(SCORED, p_label, 1), "before"),
        ("hard_survival", ()): loops(np.where(SCORED, agree, 1), "before"),
        ("within_top", (("k", 2),)): rank < 2,
    }


CASES = list(stated())


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}{dict(c[1]) or ''}")
def test_a_weight_is_its_formula(case):
    found = weights.named(case[0], dict(case[1]))(slots())
    expected = np.asarray(stated()[case], float)
    np.testing.assert_allclose(np.where(SCORED, found, 0), np.where(SCORED, expected, 0), rtol=2e-5, atol=1e-6)
    gradient = jax.grad(lambda z: weights.named(case[0], dict(case[1]))(slots(z)).sum())(jnp.asarray(LOGITS))
    np.testing.assert_array_equal(gradient, 0)


def test_until_failure_keeps_the_failure_itself():
    labels = LOGITS.argmax(-1)
    labels[0, 2] = (labels[0, 2] + 1) % V
    found = weights.until_failure(slots(labels=labels, scored=np.ones((B, K), bool)))
    np.testing.assert_array_equal(found[0], [1, 1, 1, 0])
    np.testing.assert_array_equal(found[1], 1)


@pytest.mark.parametrize("per", ["weight", "slot", "block"])
def test_the_objective_is_a_weighted_mean(per):
    o = Objective((("ce", 0.3), ("l1", 0.7)), (("decay", (("gamma", 4.0),)), ("survival", ())), per)
    total, metrics = o(slots(), Said(jnp.asarray(LOGITS)))
    q, p, all_weights = law(LOGITS), law(TARGET), stated()
    nats = -0.3 * np.log(np.take_along_axis(q, LABELS[..., None], -1)[..., 0]) + 0.7 * np.abs(p - q).sum(-1)
    w = SCORED * all_weights["decay", (("gamma", 4.0),)] * all_weights["survival", ()]
    count = {"weight": w.sum(), "slot": SCORED.sum(), "block": 2}[per]
    np.testing.assert_allclose(total, (w * nats).sum() / count, rtol=1e-5)
    assert metrics["loss"] == total


EVERY = Objective(
    tuple((name, 0.5) for name in ("ce", *divergence.NAMES)),
    tuple((name, settings) for name, settings in {n: s for n, s in CASES}.items()),
    confidence=1.0,
    base_until=0.5,
)


@pytest.mark.parametrize("per", ["weight", "slot", "block"])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30])
def test_slots_that_do_not_count_give_no_gradient_whatever_they_hold(per, garbage):
    o = Objective(EVERY.divergences, EVERY.weights, per, 1.0, 0.5)

    def loss(logits, base, confidence, scored):
        target = jnp.where(scored[..., None], jnp.asarray(TARGET), garbage)
        return o(slots(logits, scored, target=target), Said(logits, base, confidence), 0.25)[0]

    dirty = jnp.where(SCORED[..., None], jnp.asarray(LOGITS), garbage)
    confidence = jnp.where(SCORED, 0.3, garbage)
    for scored in (SCORED, np.zeros_like(SCORED)):
        given = (jnp.where(scored[..., None], dirty, garbage),) * 2 + (jnp.where(scored, confidence, garbage),)
        value, gradients = jax.value_and_grad(loss, argnums=(0, 1, 2))(*given, jnp.asarray(scored))
        assert np.isfinite(value)
        for g in gradients:
            assert np.isfinite(g).all() and (np.asarray(g)[~scored] == 0).all()
        if not scored.any():
            assert value == 0
    assert any(
        np.abs(g).max() > 0 for g in jax.grad(loss, argnums=(0, 1, 2))(dirty, dirty, confidence, jnp.asarray(SCORED))
    )


@pytest.mark.parametrize("edge", ["q", "p", "both"])
def test_gradients_are_finite_for_points(edge):
    point = np.full((B, K, V), -np.inf, np.float32)
    point[..., 0] = 0
    logits, target = (point if edge in (n, "both") else full for n, full in (("q", LOGITS), ("p", TARGET)))
    given = lambda z: EVERY(slots(z, target=target), Said(z, z, z[..., 0]), 0.25)[0]  # noqa: E731
    value, gradient = jax.value_and_grad(given)(jnp.asarray(logits))
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_d_pace_without_smoothing_is_the_gradient_of_the_expected_length():
    """The identity that the weights come from: d(sum_j prod_{i <= j} q_i) = sum_k weight_k d log q_k."""
    scored = jnp.asarray(SCORED)

    def surrogate(z):
        chance = jnp.exp(-divergence.cross_entropy(z, jnp.asarray(LABELS)))
        return -expected_length(jnp.where(scored, chance, 0.0)).sum() / 2  # two blocks count

    o = Objective((("ce", 1.0),), (("d_pace", (("alpha", 0.0),)),), "block")
    found = jax.grad(lambda z: o.of_slots(slots(z)))(jnp.asarray(LOGITS))
    np.testing.assert_allclose(found, jax.grad(surrogate)(jnp.asarray(LOGITS)), rtol=1e-4, atol=1e-7)


def test_expected_with_lk_is_the_gradient_of_the_expected_acceptance():
    scored = jnp.asarray(SCORED)

    def surrogate(z):
        alpha = 1 - divergence.total_variation(z, jnp.asarray(TARGET))
        return -expected_length(jnp.where(scored, alpha, 0.0)).sum() / 2

    o = Objective((("lk", 1.0),), (("expected", ()),), "block")
    found = jax.grad(lambda z: o.of_slots(slots(z)))(jnp.asarray(LOGITS))
    np.testing.assert_allclose(found, jax.grad(surrogate)(jnp.asarray(LOGITS)), rtol=1e-4, atol=1e-6)


def test_expected_length_is_its_sum():
    chance = np.array([[0.5, 0.5, 0.0, 1.0], [1, 1, 1, 1]])
    np.testing.assert_allclose(expected_length(jnp.asarray(chance)), [0.75, 4.0])


def test_dominos_curriculum_moves_from_the_base_to_the_head():
    base = jnp.asarray(LOGITS[::-1].copy())
    o, plain = Objective(base_until=0.5), Objective()
    said, s = Said(jnp.asarray(LOGITS), base), slots()
    head, under = plain.of_slots(s), plain.of_slots(s.over(base))
    for done, share in ((0.0, 1.0), (0.25, 0.5), (0.5, 0.0), (0.9, 0.0)):
        np.testing.assert_allclose(o(s, said, done)[0], share * under + (1 - share) * head, rtol=1e-6)


def test_a_label_that_is_no_candidate_teaches_the_base():
    base = jnp.asarray(np.random.default_rng(5).normal(size=LOGITS.shape), jnp.float32)
    label = jnp.arange(LOGITS.shape[-1]) == jnp.asarray(LABELS)[..., None]
    without = jnp.where(label, -jnp.inf, jnp.asarray(LOGITS))
    first = jnp.asarray(SCORED) & (jnp.arange(LOGITS.shape[-2]) == 0)
    mixed = jnp.where(first[..., None], without, jnp.asarray(LOGITS))
    loss = lambda z, base: Objective()(slots(z), Said(z, base))[0]  # noqa: E731
    want = jnp.where(first[..., None], base, jnp.asarray(LOGITS))
    np.testing.assert_allclose(loss(mixed, base), Objective()(slots(want), Said(want))[0], rtol=1e-6)
    own, under = jax.grad(loss, (0, 1))(mixed, base)
    assert np.isfinite(own).all() and not own[first].any() and np.abs(under[first]).max(-1).min() > 0
    assert not under[~first].any()


def test_the_confidence_head_learns_the_chance_of_acceptance():
    """Its loss is least where its sigmoid is 1 - TV, and has no gradient into the law."""
    z = jnp.asarray(RNG.normal(size=(B, K)), jnp.float32)
    q, p = law(LOGITS), law(TARGET)
    alpha, c = 1 - np.abs(p - q).sum(-1) / 2, 1 / (1 + np.exp(-np.asarray(z, float)))
    nats = -(alpha * np.log(c) + (1 - alpha) * np.log(1 - c))
    found = objective.confidence_loss(slots(), z)
    np.testing.assert_allclose(np.asarray(found)[SCORED], nats[SCORED], rtol=1e-4)
    at_best = jnp.log(slots().overlap() / (1 - slots().overlap()))
    gradient = jax.grad(lambda z: jnp.where(SCORED, objective.confidence_loss(slots(), z), 0).sum())(at_best)
    np.testing.assert_allclose(np.asarray(gradient)[SCORED], 0, atol=1e-6)
    into = jax.grad(lambda logits: objective.confidence_loss(slots(logits), z).sum())(jnp.asarray(LOGITS))
    np.testing.assert_array_equal(into, 0)


def test_labels_outside_the_draft_vocabulary_do_not_count():
    labels = np.where(np.arange(K) == 1, -1, LABELS)
    found = slots(labels=labels)
    np.testing.assert_array_equal(found.scored, SCORED & (labels >= 0))


def test_accuracy_is_by_slot():
    metrics = objective.accuracy(slots())
    hit = (LOGITS.argmax(-1) == LABELS) & SCORED
    for k in range(K):
        np.testing.assert_allclose(metrics[f"right_{k + 1}"], hit[:, k].sum() / max(1, SCORED[:, k].sum()), rtol=1e-6)
    np.testing.assert_allclose(metrics["in_a_row"], np.cumprod(hit, -1).sum() / 2, rtol=1e-6)


def test_a_table_of_a_file_is_an_objective():
    table = {"divergences": {"ce": 0.1, "l1": 0.9}, "weights": {"decay": {"gamma": 4}}, "confidence": 1.0}
    found = Objective.from_dict(table)
    assert found == Objective((("ce", 0.1), ("l1", 0.9)), (("decay", (("gamma", 4),)),), confidence=1.0)
    assert found.needs_law and not Objective().needs_law and hash(found) is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"divergences": {"kl": 1.0}}, "divergences: got 'kl'"),
        ({"divergences": {}}, "divergences: got none"),
        ({"weights": {"fade": {}}}, "weights: got 'fade'"),
        ({"weights": {"decay": {}}}, "weights: got decay with {}, takes gamma"),
        ({"weights": {"d_pace": {"beta": 1}}}, "weights: got d_pace"),
        ({"per": "row"}, "per: got 'row'"),
        ({"weights": {"decay": {"gamma": 0.0}}}, "weights.decay.gamma: got 0.0, takes a number in \\(0.0, inf\\]"),
        ({"weights": {"within_top": {"k": 1.5}}}, "weights.within_top.k: got 1.5, takes an integer in \\[1, inf\\]"),
        ({"weights": {"powers": {"base": 0.6, "share": 1}}}, "weights.powers.share: got 1, takes true or false"),
        ({"weights": {"decay": 4.0}}, "weights.decay: got 4.0, takes a table"),
        ({"weights": ["decay"]}, "weights: got \\['decay'\\], takes a table"),
        ({"divergences": {"ce": -1.0}}, "divergences.ce: got -1.0, takes a number in \\[0.0, inf\\]"),
        ({"divergences": {"ce": 0.0}}, "divergences: got {'ce': 0.0}, takes a factor over 0"),
        ({"confidence": -1}, "confidence: got -1"),
        ({"base_until": 0}, "base_until: got 0"),
        ({"gamma": 4}, "objective: got \\['gamma'\\]"),
    ],
)
def test_mistakes_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Objective.from_dict(settings)


def test_what_a_drafter_lacks_is_named():
    with pytest.raises(ValueError, match="base_until"):
        Objective(base_until=1.0)(slots(), Said(jnp.asarray(LOGITS)))
    with pytest.raises(ValueError, match="confidence"):
        Objective(confidence=1.0)(slots(), Said(jnp.asarray(LOGITS)))
    with pytest.raises(ValueError, match="target: got None"):
        Objective((("tv", 1.0),)).of_slots(Slots.of(*(jnp.asarray(x) for x in (LOGITS, LABELS, SCORED))))
