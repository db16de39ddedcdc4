"""The GPU kernel: interpreted on CPU against the recurrence, planted faults, and through XLA:GPU for an H100."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import aot
from pallas_kernels.gated_delta import Pending, fold, gated_delta, gpu, reference
from tests.pallas_kernels.gated_delta.cases import REGIMES, Case, accept, check, close, inputs, sequential

interpreted = functools.partial(gpu.gated_delta, interpret=True)
small = functools.partial(interpreted, config=gpu.Config(16, 16))
TREE = Case(dv=32, dk=32)
KINDS = {
    "tree": TREE,
    "chain": Case(n=20, used=(20, 3), dk=16, dv=16, chain=True),
    "one node": Case(n=1, used=(1, 1), depth=1, dk=16, dv=16),
    "siblings": Case(n=5, used=(5, 2), depth=1, dk=16, dv=16),
    "no norms, three value heads": Case(hk=1, hv=3, dk=48, dv=16, norms=False),
    "no delta rule": Case(dk=16, dv=16, delta=False),
    "beta up to 2": Case(dk=16, dv=16, most_beta=2.0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_recurrence(kind):
    check(small, KINDS[kind], shared=True)


@pytest.mark.parametrize("regime", REGIMES)
def test_regimes(regime):
    check(small, dataclasses.replace(TREE, regime=regime), shared=True)


MANY = ((64, 16, "init"), (64, 64, "adv"), (128, 16, "hicorr"))


@pytest.mark.slow
@pytest.mark.parametrize(("n", "depth", "regime"), MANY)
def test_many_nodes(n, depth, regime):
    case = Case(used=(n, n // 2), n=n, depth=depth, hk=1, hv=2, dk=128, dv=128, regime=regime)
    check(interpreted, case, tolerance=1e-5)


def waiting(p, regime="init", k_dtype="float32"):
    """A tree, and an accepted path of at most p nodes, the second row's with nothing accepted."""
    x = inputs(dataclasses.replace(TREE, used=(16, 16), regime=regime), 1)
    before = inputs(dataclasses.replace(TREE, used=(16, 16), depth=p, regime=regime), 2)
    before.k = np.asarray(jnp.asarray(before.k, k_dtype), np.float64)
    before.state = x.state
    u = gated_delta(*before.args(), **before.options(), depth=p).u
    deep = int(before.mask[0].sum(1).argmax())
    pending = accept(before, u, [deep, -1], p)
    want = np.stack([sequential(before)[2][0, deep], x.state[1]])
    return x, pending.replace(k=pending.k.astype(k_dtype)), want


@pytest.mark.parametrize(("p", "k_dtype"), ((1, "float32"), (5, "bfloat16")))
def test_pending_rows_are_folded_in(p, k_dtype):
    x, pending, want = waiting(p, "hicorr", k_dtype)
    hidden = np.asarray(pending.weight[:, 0] == 0)
    pending = pending.replace(u=jnp.where(hidden[:, None, :, None], jnp.nan, pending.u))
    got = small(*x.args(), pending, **x.options())
    close(got.state, want, 2e-6)
    np.testing.assert_array_equal(got.state[1], x.state[1].astype(np.float32))
    close(got.state, fold(jnp.asarray(x.args()[-1]), pending), 2e-6)
    x.state = want
    close(got.output, sequential(x)[0], 2e-6)


def test_bfloat16_arrays():
    """Also the state, whose rounding is the same as the reference's."""
    x, pending, _ = waiting(4)
    q, k, v, decay, beta, mask, state = x.args()
    narrow = lambda y: jnp.asarray(y, jnp.bfloat16)  # noqa: E731
    args = (narrow(q), narrow(k), narrow(v), decay, beta, mask, narrow(state), pending.replace(k=narrow(pending.k)))
    got, want = (f(*args, **x.options()) for f in (small, reference.gated_delta))
    assert got.output.dtype == got.state.dtype == jnp.bfloat16
    wide = lambda y: np.asarray(y.astype(jnp.float32))  # noqa: E731
    close(wide(got.output), wide(want.output), 8e-3)
    close(got.u, want.u, 2e-6)
    close(wide(got.state), wide(want.state), 4e-3)


def test_nan_reaches_those_that_see_it():
    x = inputs(dataclasses.replace(TREE, used=(12, 16), depth=4))
    x.v[0, np.flatnonzero(x.mask[0].any(1))[1], 0] = np.nan
    x.q[1, 3, 1] = np.nan
    got, want = (f(*x.args(), **x.options()) for f in (small, reference.gated_delta))
    np.testing.assert_array_equal(np.isnan(got.output), np.isnan(want.output))
    np.testing.assert_array_equal(np.isnan(got.u), np.isnan(want.u))
    assert np.isnan(want.output).any() and not np.isnan(want.output).all()
    close(np.nan_to_num(got.output), np.nan_to_num(want.output), 2e-6)


FAULTS = {
    "all pairs of rows alike": lambda a, *r: jnp.zeros_like(DOT(a, *r)) if r[1:] == (1, 1) else DOT(a, *r),
    "single passes everywhere": lambda a, b, *r: DOT(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), *r),
}
DOT = gpu._dot


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, monkeypatch):
    monkeypatch.setattr(gpu, "_dot", FAULTS[fault])
    with pytest.raises(AssertionError):
        check(small, dataclasses.replace(TREE, regime="slow"))


def test_an_unfinished_bisection_is_found():
    """The depth is the solve's; its bound is checked by `shield`, so this one is planted behind that."""
    x = inputs(dataclasses.replace(TREE, regime="adv", used=(16, 16)))
    solve, short = gpu._solve, lambda lower, rhs, level, depth: solve(lower, rhs, level, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "_solve", short)
        with pytest.raises(AssertionError):
            close(small(*x.args(), **x.options()).output, sequential(x)[0], 2e-6)


def test_configs_that_do_not_fit_are_refused():
    x = inputs(TREE)
    with pytest.raises(ValueError, match="config: got Config"):
        interpreted(*x.args(), **x.options(), config=gpu.Config(64, 16))
    with pytest.raises(ValueError, match="config: got columns 24"):
        gpu.Config(24, 16)


def shapes(b, n, hk=16, hv=32, dk=128, dv=128, p=8, dtype="bfloat16"):
    array = lambda *s, d="float32": jax.ShapeDtypeStruct((b, *s), jnp.dtype(d))  # noqa: E731
    args = (array(n, hk, dk, d=dtype), array(n, hk, dk, d=dtype), array(n, hv, dv, d=dtype), array(n, hv), array(n, hv))
    pending = Pending(array(p, hk, dk, d=dtype), array(p, hk), array(hv, p, dv), array(hv, p), array(hv))
    return (*args, array(n, n, d=bool), array(hv, dk, dv), pending), {"q_norm": array(n, hk), "k_norm": array(n, hk)}


@pytest.mark.parametrize("b", (1, 8))
def test_the_state_is_read_once_and_written_once(b):
    """However many programs share a head; all else of 35B at 16 nodes, L2 hits too, is 1.5 reads of it at most."""
    args, _ = shapes(b, 16)
    q, v, state, pending = args[0], args[2], args[6], args[7]
    size = b * 32 * 128 * 128 * 4
    half = jax.ShapeDtypeStruct(state.shape, jnp.bfloat16)
    for p, times in ((pending, 2), (None, 1)):
        moved = gpu.bytes_moved(q, v, state, p)
        assert moved - gpu.bytes_moved(q, v, half, p) == times * size // 2
        assert times * size < moved < (times + 1.5) * size


SHAPES = {
    "35B, 16 nodes": {"b": 4, "n": 16},
    "35B, one node": {"b": 1, "n": 1, "p": 1},
    "35B, 32 nodes": {"b": 1, "n": 32},
    "35B, 64 nodes": {"b": 1, "n": 64, "p": 16},
    "35B, 128 nodes": {"b": 1, "n": 128, "p": 16},
    "397B": {"b": 2, "n": 16, "hv": 64},
    "64 by 64, float32": {"b": 2, "n": 13, "hk": 2, "hv": 4, "dk": 64, "dv": 64, "dtype": "float32"},
    "256 by 256": {"b": 1, "n": 16, "hk": 4, "hv": 8, "dk": 256, "dv": 256},
    "96 by 192": {"b": 1, "n": 16, "hk": 4, "hv": 8, "dk": 96, "dv": 192},
}


@pytest.mark.slow
@pytest.mark.parametrize("pending", (True, False), ids=("fused", "verify"))
@pytest.mark.parametrize("shape", SHAPES)
def test_builds_for_h100_and_is_used(shape, pending):
    if lacks := aot.missing("h100"):
        pytest.skip(lacks)
    args, norms = shapes(**SHAPES[shape])
    leaves, tree = jax.tree.flatten((args if pending else args[:-1], norms))

    def call(*leaves):
        args, norms = jax.tree.unflatten(tree, leaves)
        depth = min(16, args[0].shape[1])
        return gated_delta(*args, **norms, scale=0.1, depth=depth, implementation="pallas_gpu")

    compiled = aot.compile(call, tuple(leaves), "h100")
    calls = [x for x in compiled.as_text().splitlines() if 'custom_call_target="__gpu$xla.gpu.triton"' in x]
    assert len(calls) == 1 and "gated_delta" in calls[0]
