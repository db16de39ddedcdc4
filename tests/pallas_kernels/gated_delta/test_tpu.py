"""The TPU kernel, interpreted on CPU with the passes it takes on the chip, against the recurrence in float64."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.gated_delta import Pending, fold, reference, tpu, tpu_passes
from pallas_kernels.gated_delta.factors import Staged, UnsupportedError
from tests.pallas_kernels.gated_delta.cases import REGIMES, Case, accept, check, close, inputs, sequential

interpreted = functools.partial(tpu.gated_delta, interpret=True)
high, exact = (functools.partial(interpreted, precision=precision) for precision in ("high", "exact"))
TREE = Case(dk=32, dv=16)
KINDS = {
    "tree": TREE,
    "one key head per program": Case(hk=4, hv=4, dk=128, dv=128),
    "chain": Case(n=20, used=(20, 3), dk=16, dv=16, chain=True),
    "one node": Case(n=1, used=(1, 1), depth=1, dk=16, dv=16),
    "siblings": Case(n=5, used=(5, 2), depth=1, dk=16, dv=16),
    "no norms, three value heads": Case(hk=1, hv=3, dk=48, dv=16, norms=False),
    "heads that do not fill a pack": Case(used=(24,), n=24, hk=3, hv=9, dk=16, dv=16),
    "no delta rule": Case(dk=16, dv=16, delta=False),
    "beta up to 2": Case(dk=16, dv=16, most_beta=2.0),
}
# A product of two float32 numbers in two terms each is off by 3 * 2^-18 at most, 1.1e-5: each one's rest, and rest by
# rest. Sums of such products, and the refined inverse of much alike keys, stay within twice that.
TWO_TERMS = 2e-5


def slow_but(quick, cases):
    """Cases as parameters, all but some of them marked slow: each compiles the interpreted kernel anew."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize("kind", slow_but(("tree", "one key head per program", "no delta rule"), KINDS))
def test_exact_equals_the_recurrence(kind):
    config = tpu.Config(1) if kind == "one key head per program" else None
    check(functools.partial(exact, config=config), KINDS[kind])


@pytest.mark.parametrize("regime", slow_but(("hicorr", "fast"), REGIMES))
@pytest.mark.parametrize("precision", slow_but(("high",), ("high", "exact")))
def test_regimes(precision, regime):
    case = dataclasses.replace(TREE, regime=regime)
    kernel, tolerance = (high, TWO_TERMS) if precision == "high" else (exact, 2e-6)
    check(kernel, case, tolerance=tolerance, shared=True)


MANY = ((64, 16, "init"), (64, 64, "adv"), (128, 16, "hicorr"))


@pytest.mark.slow
@pytest.mark.parametrize(("n", "depth", "regime"), MANY)
def test_many_nodes(n, depth, regime):
    case = Case(used=(n, n // 2), n=n, depth=depth, hk=1, hv=2, dk=128, dv=128, regime=regime)
    check(interpreted, case, tolerance=2 * TWO_TERMS)
    check(exact, case, tolerance=5e-6)


def waiting(p, regime="init", k_dtype="float32"):
    """A tree, and an accepted path of at most p nodes, the second row's with nothing accepted."""
    x = inputs(dataclasses.replace(TREE, used=(16, 16), regime=regime), 1)
    before = inputs(dataclasses.replace(TREE, used=(16, 16), depth=p, regime=regime), 2)
    before.k = np.asarray(jnp.asarray(before.k, k_dtype), np.float64)
    before.state = x.state
    u = reference.gated_delta(*before.args(), **before.options(), depth=p).u
    deep = int(before.mask[0].sum(1).argmax())
    pending = accept(before, u, [deep, -1], p)
    want = np.stack([sequential(before)[2][0, deep], x.state[1]])
    return x, pending.replace(k=pending.k.astype(k_dtype)), want


@pytest.mark.parametrize("k_dtype", slow_but(("bfloat16",), ("float32", "bfloat16")))
@pytest.mark.parametrize("p", slow_but((5,), (1, 5)))
@pytest.mark.parametrize("precision", slow_but(("high",), ("high", "exact")))
def test_pending_rows_are_folded_in(p, k_dtype, precision):
    tolerance = TWO_TERMS if precision == "high" else 2e-6
    x, pending, want = waiting(p, "hicorr", k_dtype)
    hidden = np.asarray(pending.weight[:, 0] == 0)

    def fill(y, at):
        return jnp.where(hidden[at], jnp.nan, y)

    pending = pending.replace(u=fill(pending.u, np.s_[:, None, :, None]), k=fill(pending.k, np.s_[:, :, None, None]))
    got = interpreted(*x.args(), pending, **x.options(), precision=precision)
    close(got.state, want, tolerance)
    np.testing.assert_array_equal(got.state[1], x.state[1].astype(np.float32))
    close(got.state, fold(jnp.asarray(x.args()[-1]), pending), tolerance)
    x.state = want
    close(got.output, sequential(x)[0], 5 * tolerance)


def narrow(*arrays):
    return tuple(jnp.asarray(y, jnp.bfloat16) for y in arrays)


@pytest.mark.slow
def test_bfloat16_arrays():
    """Also the state, whose rounding is the reference's but where a sum is near the middle."""
    x, pending, _ = waiting(4)
    q, k, v, decay, beta, mask, state = x.args()
    (q, k, v, state), pending = narrow(q, k, v, state), pending.replace(k=narrow(pending.k)[0])
    args = (q, k, v, decay, beta, mask, state, pending)
    got, want = (f(*args, **x.options()) for f in (interpreted, reference.gated_delta))
    assert got.output.dtype == got.state.dtype == jnp.bfloat16 and got.u.dtype == jnp.float32
    close(got.state, want.state, 4e-3)
    close(got.u, want.u, 4e-3)
    close(got.output, want.output, 8e-3)


@pytest.mark.slow
def test_raw_bfloat16_rows_cost_no_accuracy():
    """A bfloat16 array is exact in a single pass, so that only the state and u are ever split."""
    x = inputs(dataclasses.replace(TREE, used=(16,), dk=128))
    (x.q, x.k, x.v) = (np.asarray(y, np.float64) for y in narrow(x.q, x.k, x.v))
    q, k, v, *rest = x.args()
    got = interpreted(*narrow(q, k), v, *rest, **x.options())
    output, u, _ = sequential(x)
    close(got.output, output, 1.5e-5)
    close(got.u, u, 1.5e-5)


@pytest.mark.parametrize("kind", slow_but(("tree",), ("tree", "no delta rule")))
def test_nan_reaches_those_that_see_it_and_nobody_else(kind):
    x = inputs(KINDS[kind])
    leaf = int(np.flatnonzero(x.mask[0].sum(0) == 1)[0])
    clean = interpreted(*x.args(), **x.options())
    x.v[0, leaf, 1] = np.nan
    x.k[1, int(x.mask[1].sum(1).argmax()), 0, 3] = np.inf
    got, want = (f(*x.args(), **x.options()) for f in (interpreted, reference.gated_delta))
    for one, two, before in zip((got.output, got.u), (want.output, want.u), (clean.output, clean.u), strict=True):
        np.testing.assert_array_equal(np.isnan(one), np.isnan(two))
        assert 0 < np.isnan(one).sum() < one.size / 4
        np.testing.assert_array_equal(one[~np.isnan(one)], before[~np.isnan(one)])


def test_a_node_deeper_than_promised_is_nan():
    x = inputs(TREE)
    got = interpreted(*x.args(), **x.options(), depth=4)
    np.testing.assert_array_equal(np.isnan(got.output).all((2, 3)), x.mask.sum(-1) > 4)


@pytest.mark.slow
def test_the_order_of_nodes_does_not_matter():
    x = inputs(dataclasses.replace(TREE, used=(16, 16)))
    order = np.random.default_rng(3).permutation(16)
    some = interpreted(*x.args(), **x.options(), depth=8)
    for name in ("q", "k", "v", "decay", "beta", "q_norm", "k_norm"):
        setattr(x, name, getattr(x, name)[:, order])
    x.mask = x.mask[:, order][:, :, order]
    other = interpreted(*x.args(), **x.options(), depth=8)
    close(other.output, some.output[:, order], 3e-5)
    close(other.u, some.u[:, :, order], 3e-5)


SPLIT, TREE_OF, SCALARS = tpu_passes.split, tpu._tree, tpu._scalars
FAULTS = {
    "one term for two": (tpu_passes, "split", lambda x, terms: SPLIT(x, 1 if terms == 2 else terms)),
    "levels of the bisection mixed up": (tpu, "_tree", lambda mask, pack: flipped(*TREE_OF(mask, pack))),
    "key norms on another head's lanes": (tpu, "_scalars", lambda *args: turned(*SCALARS(*args))),
}


def flipped(ancestors, levels, apart):
    return ancestors, jnp.where(levels == 1, 2, levels), apart


def turned(columns, rows):
    return columns, jnp.roll(rows, 16, axis=-1)


@pytest.mark.parametrize("fault", slow_but(("one term for two",), FAULTS))
def test_planted_faults_are_found(fault, monkeypatch):
    """Also that the passes which the chip takes are those that are tested: a product in one is found out here.

    Keys much alike, or the refinement of the inverse mends what a mixed up bisection leaves of it.
    """
    owner, name, wrong = FAULTS[fault]
    case = dataclasses.replace(TREE, regime="hicorr")
    check(interpreted, case, tolerance=TWO_TERMS)
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(AssertionError):
        check(interpreted, case, tolerance=10 * TWO_TERMS)


BLOCK_SPEC = tpu.pl.BlockSpec


@pytest.mark.slow
@pytest.mark.parametrize("race", (False, True), ids=("as it is", "planted race"))
def test_no_race_on_two_cores(race, monkeypatch):
    """The interpreter that models DMA and memory; two programs that write one head's state are a race."""
    x = inputs(Case(used=(16,), hk=2, hv=2, dk=128, dv=128))
    pending = accept(x, jnp.ones((1, 2, 16, 128)), [int(x.mask[0].sum(1).argmax())], 8)

    def first_head(shape, at):
        moved = shape[-2:] == (128, 128)
        return BLOCK_SPEC(shape, (lambda i, h: (at(i, h)[0], 0, *at(i, h)[2:])) if moved else at)

    if race:
        monkeypatch.setattr(tpu.pl, "BlockSpec", first_head)
    mode = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    pltpu.reset_tpu_interpret_mode_state()
    try:
        call = functools.partial(tpu.gated_delta, interpret=mode, config=tpu.Config(1))
        got = jax.block_until_ready(call(*x.args(), pending, **x.options()))
        assert interpret_pallas_call.races.races_found == race
        if not race:
            close(got.state, fold(jnp.asarray(x.args()[-1]), pending), TWO_TERMS)
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def shapes(b=4, n=16, p=8, hk=16, hv=32, dk=128, dv=128, state="float32"):
    """q, v, state and pending rows as `plan` takes them, those of Qwen3.5 35B by default."""

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct((b, *shape), dtype)

    pending = Pending(array("bfloat16", p, hk, dk), None, array("float32", hv, p, dv), None, None)  # type: ignore
    tokens = (array("bfloat16", n, hk, dk), array("bfloat16", n, hv, dv), array(state, hv, dk, dv))
    return (*tokens, pending) if p else tokens


@pytest.mark.parametrize("state", ("float32", "bfloat16"))
@pytest.mark.parametrize("p", (0, 8))
def test_the_state_is_moved_once_in_and_once_out(p, state):
    """Every array's bytes once, the tree's once per sequence; nothing but the state comes near its size."""
    q, v, s, *pending = shapes(p=p, state=state)

    def size(x):
        return math.prod(x.shape) * jnp.dtype(x.dtype).itemsize

    moved = tpu.bytes_moved(q, v, s, *pending)
    states = size(s) * (2 if p else 1)
    rows = 2 * size(q) + 2 * size(v) + 2 * size(v) + (size(pending[0].k) + size(pending[0].u) if p else 0)
    rest = moved - states - rows
    assert 0 < rest < 0.03 * states
    spec = tpu.plan(q, v, s, *pending).spec
    blocks = [tuple(int(i) for i in spec.in_specs[8].index_map(b, h)) for b in range(4) for h in range(spec.grid[1])]
    assert len(set(blocks)) == len(blocks) == math.prod(spec.grid)
    assert math.prod(spec.in_specs[8].block_shape) * len(blocks) == math.prod(s.shape)


def test_what_cannot_be_served_is_refused():
    x = inputs(TREE)
    q, k, v, decay, beta, mask, state = map(jnp.asarray, x.args())
    call = functools.partial(tpu.gated_delta, **x.options())
    with pytest.raises(UnsupportedError, match="decay: got one per channel"):
        call(q, k, v, jnp.zeros((2, 16, 4, 32)), beta, mask, state)
    staged = Staged(k, None, jnp.zeros((2, 4, 16, 16)), decay)
    with pytest.raises(UnsupportedError, match="staged: got rows of earlier nodes"):
        call(q, k, v, decay, beta, mask, state, staged=staged)
    with pytest.raises(UnsupportedError, match="q: got float16, pallas_tpu takes float32 or bfloat16"):
        call(q.astype(jnp.float16), k, v, decay, beta, mask, state)
    with pytest.raises(UnsupportedError, match="q: got 130 nodes, pallas_tpu takes at most 128"):
        tpu.plan(*shapes(n=130))
    with pytest.raises(UnsupportedError, match="q: got 16 nodes on states of 1024 x 1024 x 2"):
        tpu.plan(*shapes(dk=1024, dv=1024))
    with pytest.raises(ValueError, match="precision: got 'low', takes 'high' or 'exact'"):
        call(q, k, v, decay, beta, mask, state, precision="low")
    for heads in (0, 3, 1):
        with pytest.raises(ValueError, match=f"config: got {heads} heads, takes a divisor of 16"):
            tpu.plan(*shapes(dk=64), config=tpu.Config(heads))
