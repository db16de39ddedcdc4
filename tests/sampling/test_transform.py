"""The transform against a plain float64 one that sorts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spec_jax import noise
from spec_jax.sampling import transform
from spec_jax.sampling.constraint import free, from_transitions
from spec_jax.sampling.history import History
from spec_jax.sampling.settings import Sampling, to_row
from tests.faults import oracle

V = 12
SETTINGS = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.3),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=2.0, top_k=5),
    Sampling(temperature=1.0, top_k=10**6),
    Sampling(temperature=0.8, top_p=0.6),
    Sampling(temperature=1.0, top_p=1e-9),
    Sampling(temperature=1.5, min_p=0.2),
    Sampling(temperature=1.0, min_p=1.0),
    Sampling(temperature=0.7, top_k=6, top_p=0.8, min_p=0.05),
    Sampling(temperature=1.3, top_k=3, top_p=0.95),
    Sampling(temperature=1e-20, top_k=3),
    Sampling(temperature=1e20, top_p=0.547),
]


def _choose_slowly(z, row, key, position):
    noisy = z + row.temperature * noise.gumbel(key, position, jnp.arange(z.shape[0]))
    kept = jnp.where(~row.sampled | transform.support(z, row), noisy, -jnp.inf)
    found = ~jnp.isnan(z).any() & (kept > -jnp.inf).any()
    return jnp.where(found, jnp.argmax(kept), -1)


support = jax.jit(transform.support)
log_probs = jax.jit(transform.log_probs)
choose = jax.jit(transform.choose)
rows_of = jax.jit(
    lambda z, row, keys: (
        jax.vmap(transform.support)(z, row),
        jax.vmap(transform.log_probs)(z, row),
        jax.vmap(transform.choose, (0, 0, 0, None))(z, row, keys, jnp.int32(4)),
        jax.vmap(_choose_slowly, (0, 0, 0, None))(z, row, keys, jnp.int32(4)),
    )
)


def batch(vocab):
    """All settings, over plain logits, tied ones, few live ones, and one."""
    rng = np.random.default_rng(vocab)
    z = np.concatenate(
        [
            rng.normal(0, 2, (len(SETTINGS) * 20, vocab)),
            rng.integers(-2, 3, (len(SETTINGS) * 10, vocab)),
            rng.choice([-np.inf, -np.inf, -1.5, 0.25, 2.0], (len(SETTINGS) * 10, vocab)),
            np.where(np.arange(vocab) == rng.integers(0, vocab, (len(SETTINGS), 1)), 0.0, -np.inf),
        ]
    )
    z[:, 0] = np.where((z == -np.inf).all(1), 0.0, z[:, 0])
    which = np.arange(len(z)) % len(SETTINGS)
    rows = [to_row(s, vocab) for s in SETTINGS]
    row = jax.tree.map(lambda *x: jnp.stack(x)[which], *rows)
    return z.astype(np.float32), row, [SETTINGS[i] for i in which]


@pytest.mark.parametrize("vocab", [V, 300])
def test_a_batch_against_sorting(vocab):
    z, row, chosen = batch(vocab)
    keys = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (len(z), 2), dtype=np.uint32))
    kept, logs, fast, slow = jax.device_get(rows_of(jnp.asarray(z), row, keys))
    for i, s in enumerate(chosen):
        if s.temperature > 0:
            assert (kept[i] == oracle.kept(z[i], s)).all(), (i, s)
        with np.errstate(divide="ignore"):
            want = np.log(oracle.law(z[i].astype(np.float64), s))
        np.testing.assert_allclose(np.exp(logs[i]), np.exp(want), rtol=0, atol=3e-6)
        assert not np.isnan(logs[i]).any() and ((logs[i] == -np.inf) | kept[i]).all()
        assert abs(np.exp(logs[i].astype(np.float64)).sum() - 1) < 1e-5
    assert (fast == slow).all()
    assert (z[np.arange(len(z)), fast] > -np.inf).all()


values = st.one_of(st.floats(-8, 8, width=32, allow_subnormal=False), st.integers(-3, 3).map(float), st.just(-np.inf))
samplings = {
    "temperature": st.floats(0.125, 4, width=32),
    "top_k": st.integers(0, V + 2),
    "top_p": st.one_of(st.just(1.0), st.floats(2**-6, 1, width=32)),
    "min_p": st.one_of(st.just(0.0), st.floats(0, 1, width=32)),
}


@given(st.lists(values, min_size=V, max_size=V), st.fixed_dictionaries(samplings), st.integers(0, 2**32))
@settings(max_examples=150)
def test_any_logits(z, given, seed):
    z, s = np.array(z, np.float32), Sampling(**given)
    assume((z > -np.inf).any() and not _on_an_edge(z, s))
    row, key = to_row(s, V), noise.request_key(seed)
    kept = np.asarray(support(jnp.asarray(z), row))
    assert (kept == oracle.kept(z, s)).all()
    token = int(choose(jnp.asarray(z), row, key, jnp.int32(9)))
    noisy = z + s.temperature * np.asarray(noise.gumbel(key, jnp.int32(9), jnp.arange(V)))
    assert token == np.argmax(np.where(kept, np.float32(noisy), -np.inf))


def _on_an_edge(z, s):
    """Whether a token's mass lies so near a threshold that float32 may tell otherwise."""
    p = oracle.softmax(z.astype(np.float64) / s.temperature)
    inside = oracle.kept(z, Sampling(temperature=s.temperature, top_k=s.top_k))
    p_k = np.where(inside, p, 0) / p[inside].sum()
    above = np.array([p_k[z > value].sum() for value in z])
    near = lambda x, limit: abs(x - limit).min() < 1e-5  # noqa: E731
    return s.top_p < 1 and near(above, s.top_p) or 0 < s.min_p < 1 and near(p / p.max(), s.min_p)


@pytest.mark.parametrize("s", SETTINGS)
def test_nan_and_no_token_give_no_token(s):
    alone = [[bad if i == at else 0.0 for i in range(V)] for bad in (jnp.nan, jnp.inf) for at in (0, V - 1)]
    for z in (*alone, [jnp.nan] * V, [-jnp.inf] * V, [jnp.inf] * V):
        assert choose(jnp.array(z), to_row(s, V), noise.request_key(0), jnp.int32(0)) == -1


def test_greedy_takes_the_lowest_of_tied_tokens():
    z = jnp.array([1.0, 3.0, -1.0, 3.0, 3.0] + [0.0] * (V - 5))
    row = to_row(Sampling(), V)
    assert choose(z, row, noise.request_key(0), jnp.int32(0)) == 1
    assert transform.choose(z, row, noise.request_key(0), jnp.int32(0), sampled=False) == 1
    assert jnp.exp(log_probs(z, row)).tolist() == [0, 1] + [0] * (V - 2)


def test_ties_stay_or_go_together():
    z = jnp.log(jnp.array([0.3, 0.2, 0.2, 0.2, 0.1] + [0.0] * (V - 5)))
    keeps = lambda **s: int(support(z, to_row(Sampling(temperature=1.0, **s), V)).sum())  # noqa: E731
    assert [keeps(top_k=k) for k in range(1, 6)] == [1, 4, 4, 4, 5]
    assert [keeps(top_p=p) for p in (0.2, 0.4, 0.85, 0.95)] == [1, 4, 4, 5]
    assert keeps(top_k=2, top_p=0.5) == 4
    assert [keeps(min_p=p) for p in (0.6, 0.7)] == [4, 1]


def test_signed_zeros_tie():
    z = jnp.array([-0.0, 0.0, -1.0] + [-2.0] * (V - 3))
    assert support(z, to_row(Sampling(temperature=1.0, top_k=1), V))[:3].tolist() == [True, True, False]


def history(prompt=(), output=(), state=0):
    count = lambda ids: jnp.asarray(np.bincount(np.array(ids, int), minlength=V), jnp.int32)  # noqa: E731
    return History(jnp.int32(len(output)), jnp.int32(state), count(output), count(prompt) > 0)


adjust = jax.jit(transform.adjust)
ADJUSTED = [
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 0.7},
    {"frequency_penalty": 0.4},
    {"presence_penalty": -1.0, "frequency_penalty": -0.5},
    {"logit_bias": {2: 1.5, 7: -np.inf}},
    {"banned_tokens": (0, 11)},
    {"min_new_tokens": 4},
    {"min_new_tokens": 3},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "logit_bias": {1: 3.0}, "min_new_tokens": 9},
]
TURN = np.where(np.arange(V) % 3 == 0, -1, np.array([[1], [0]]))


@pytest.mark.parametrize("state", [None, 0, 1])
@pytest.mark.parametrize("changes", ADJUSTED)
def test_adjust(changes, state):
    s, prompt, output, eos = Sampling(**changes), (1, 1, 4), (4, 5, 5), (3, 8)
    z = np.random.default_rng(1).normal(0, 2, V).astype(np.float32)
    bound = free(V) if state is None else from_transitions(TURN)
    got = adjust(jnp.asarray(z), to_row(s, V, eos), history(prompt, output, 0 if state is None else state + 1), bound)
    want = oracle.adjusted(z, s, prompt, output, eos, None if state is None else TURN[state] >= 0)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_order():
    """Figures that tell each order from the one with two neighbours swapped."""
    z = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1] + [1e-9] * (V - 4)))
    # Penalties before the bias: the other way round the bias would be divided too.
    s = Sampling(repetition_penalty=2.0, logit_bias={0: 4.0})
    assert adjust(z, to_row(s, V), history(prompt=(0,)), free(V))[0] == pytest.approx(2 * np.log(0.4) + 4)
    kept = lambda **s: int(support(z, to_row(Sampling(**s), V)).sum())  # noqa: E731
    # Temperature before top-p: at temperature 2 the likeliest two hold 0.61 of the mass, not 0.7.
    assert (kept(temperature=2.0, top_p=0.65), kept(temperature=1.0, top_p=0.65)) == (3, 2)
    # Top-k before top-p: the likeliest two hold 0.78 of what top-k leaves.
    assert (kept(temperature=1.0, top_k=3, top_p=0.75), kept(temperature=1.0, top_p=0.75)) == (2, 3)


def test_extreme_temperatures_have_their_limits():
    z = jnp.array([5.0, 4.999, 5.0, -jnp.inf] + [0.0] * (V - 4))
    cold, hot = (np.exp(log_probs(z, to_row(Sampling(temperature=t), V))) for t in (1e-30, 1e30))
    np.testing.assert_allclose(cold[:4], [0.5, 0, 0.5, 0], atol=1e-6)
    np.testing.assert_allclose(hot, np.where(np.arange(V) == 3, 0, 1 / (V - 1)), atol=1e-6)
    near = log_probs(jnp.array([5.0, 4.999] + [-9.0] * (V - 2)), to_row(Sampling(temperature=1e-3), V))
    np.testing.assert_allclose(near[:2], np.log(oracle.softmax(np.array([5.0, np.float32(4.999)]) / 1e-3)), atol=1e-6)
