"""Prefill and training in chunks, against one token after another."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.gated_delta import chunked
from tests.pallas_kernels.gated_delta.cases import REGIMES, Case, close, inputs, sequential

T = 37
CALL = jax.jit(chunked, static_argnames=("scale", "chunk", "implementation"))


def texts(regime="init", counts=(37, 16, 0), **options):
    """Texts of these lengths; tokens behind them are NaN."""
    return inputs(Case(used=counts, n=T, chain=True, dk=8, dv=12, regime=regime, **options))


def run(x, counts, dtype="float32", **options):
    q, k, v, decay, beta, _, state = x.args(dtype)
    return CALL(q, k, v, decay, beta, state, jnp.asarray(counts), **x.options(dtype), **options)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("kind", ({}, {"channels": True}, {"delta": False}, {"norms": False, "hk": 1, "hv": 3}))
def test_equals_the_recurrence(regime, kind):
    """Lengths that end within a chunk, at its edge, and at nothing."""
    counts = (37, 16, 0)
    x = texts(regime, counts, **kind)
    out, _, states = sequential(x)
    got, state = run(x, counts, chunk=8)
    close(got, out, 2e-6)
    last = np.stack([states[0, 36], states[1, 15], x.state[2]])
    close(state, last, 2e-6)
    np.testing.assert_array_equal(state[2], x.state[2].astype(np.float32))
    np.testing.assert_array_equal(got[2], 0)


def test_the_size_of_a_chunk_does_not_matter():
    x = texts("slow", (37, 20))
    ways = ((1, "xla"), (5, "xla"), (5, None), (64, "xla"))
    some = [run(x, (37, 20), chunk=chunk, implementation=implementation) for chunk, implementation in ways]
    for output, state in some[1:]:
        close(output, some[0][0], 1e-6)
        close(state, some[0][1], 1e-6)


def test_a_text_in_two_calls():
    x = texts("init", (37, 37))
    whole, last = run(x, (37, 37), chunk=8)
    part = lambda a, b: [None if y is None else y[:, a:b] for y in x.args()[:5]]  # noqa: E731
    norms = lambda a, b: {key: y if key == "scale" else y[:, a:b] for key, y in x.options().items()}  # noqa: E731
    one, state = CALL(*part(0, 20), x.args()[-1], chunk=8, **norms(0, 20))
    two, state = CALL(*part(20, T), state, chunk=8, **norms(20, T))
    close(jnp.concatenate([one, two], 1), whole, 1e-6)
    close(state, last, 1e-6)


def test_nan_in_a_text_reaches_what_follows():
    x = texts("slow", (37, 20))
    x.v[0, 10, 1] = np.nan
    output, state = run(x, (37, 20), chunk=8)
    broken = np.isnan(output).any(-1)
    np.testing.assert_array_equal(broken[0, :, 1], np.arange(T) >= 10)
    assert not broken[0, :, [0, 2, 3]].any() and not broken[1].any()
    np.testing.assert_array_equal(np.isnan(state).all((-1, -2)), [[False, True, False, False], [False] * 4])


def token_by_token(q, k, v, decay, beta, state, count, q_norm, k_norm):
    """The recurrence in JAX, for its gradients."""
    heads = v.shape[2]
    q, k = (jnp.repeat(y * norm[..., None], heads // y.shape[2], axis=2) for y, norm in ((q, q_norm), (k, k_norm)))

    def step(state, token):
        q, k, v, decay, beta, live = token
        gate = decay[..., None] if decay.ndim == 3 else decay[..., None, None]
        new = jnp.exp(gate) * state
        u = v if beta is None else beta[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", new, k))
        new = new + k[..., None] * u[..., None, :]
        state = jnp.where(live[:, None, None, None], new, state)
        return state, jnp.where(live[:, None, None], 0.25 * jnp.einsum("bhkv,bhk->bhv", new, q), 0)

    live = jnp.arange(T)[:, None] < count
    tokens = [None if y is None else y.swapaxes(0, 1) for y in (q, k, v, decay, beta)]
    state, out = lax.scan(step, state, (*tokens, live))
    return out.swapaxes(0, 1), state


def loss(arrays, weights, counts, function):
    output, state = function(**{"beta": None, **arrays}, count=counts)
    return (output * weights[0]).sum() + (state * weights[1]).sum()


OURS, WANT = (
    jax.jit(jax.grad(functools.partial(loss, function=function)))
    for function in (functools.partial(chunked, scale=0.25, chunk=8), token_by_token)
)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("kind", ({}, {"channels": True}, {"delta": False}))
def test_gradients_are_those_of_the_recurrence(regime, kind):
    counts = (37, 16, 0)
    with jax.enable_x64(True):
        x = texts(regime, counts, **kind)
        q, k, v, decay, beta, _, state = x.args("float64")
        arrays = {"q": q, "k": k, "v": v, "decay": decay, "beta": beta, "state": state}
        arrays |= {"q_norm": x.q_norm, "k_norm": x.k_norm}
        arrays = {name: jnp.asarray(y) for name, y in arrays.items() if y is not None}
        rng = np.random.default_rng(5)
        weights = [jnp.asarray(rng.normal(size=shape)) for shape in (v.shape, state.shape)]
        ours = OURS(arrays, weights, jnp.asarray(counts))
        clean = {name: jnp.nan_to_num(y) for name, y in arrays.items()}
        want = WANT(clean, weights, jnp.asarray(counts))
        for name, gradient in ours.items():
            assert np.isfinite(gradient).all(), name
            close(gradient, want[name], 1e-11)


def test_gradients_in_float32_are_finite_and_near():
    counts = (37, 16)
    x = texts("fast", counts)
    v, decay = (jnp.asarray(y, jnp.float32) for y in (x.v, x.decay))
    got = gradients(x, counts, v, decay, "float32")
    with jax.enable_x64(True):
        want = gradients(x, counts, jnp.asarray(x.v), jnp.asarray(x.decay), "float64")
    for one, two in zip(got, want, strict=True):
        close(one, two, 1e-5)


def gradients(x, counts, v, decay, dtype):
    q, k, _, _, beta, _, state = x.args(dtype)

    def loss(v, decay):
        output, last = chunked(q, k, v, decay, beta, state, jnp.asarray(counts), chunk=8, **x.options(dtype))
        return (output**2).sum() + last.sum()

    return jax.jit(jax.grad(loss, (0, 1)))(v, decay)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": 0}, "chunk: got 0, takes a positive number"),
        ({"counts": (1, 2)}, r"count: got shape \(2,\), takes \(3,\)"),
        ({"implementation": "cuda"}, "implementation: got 'cuda'"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        run(texts(), **({"counts": (3, 3, 3)} | options))
