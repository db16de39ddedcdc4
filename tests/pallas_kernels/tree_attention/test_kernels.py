"""The kernels, interpreted on CPU, against one dense softmax in float64; and proof that this finds planted faults."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tree_attention import gpu, masks, tpu
from pallas_kernels.tree_attention.blocks import Blocks
from pallas_kernels.tree_attention.ring import Ring
from tests.pallas_kernels.tree_attention.cases import CASES, Case, arrays, dense, real
from tests.pallas_kernels.tree_attention.check import check

QUICK = (
    *("ragged", "odd nodes", "short cache", "rectangular", "many sinks", "all together", "bfloat16, all together"),
    *("ring that ends in a block", "short ring"),
)
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


def interpreted(kernel, case):
    """Blocks small enough that rows have several, and a last one that ends behind the cache."""
    if kernel is gpu:
        return functools.partial(gpu.tree_attention, interpret=True, config=gpu.Config(16, 32, 3))
    config = tpu.Config(128, 1) if case.slots >= 128 else None
    return functools.partial(tpu.tree_attention, interpret=True, config=config)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kernel", (tpu, gpu), ids=("tpu", "gpu"))
def test_equals_a_dense_softmax(kernel, name):
    check(interpreted(kernel, CASES[name]), CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", (tpu, gpu), ids=("tpu", "gpu"))
@pytest.mark.parametrize("n", (8, 16, 32, 64, 128))
def test_own_block_sizes(kernel, n):
    case = Case(lengths=(0, 700, 1100), used=(n, n // 2, n), n=n, heads=8, kv=2, d=128, slots=1100, dtype="bfloat16")
    check(functools.partial(kernel.tree_attention, interpret=True), case)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", (tpu, gpu), ids=("tpu", "gpu"))
def test_float32_queries_on_a_bfloat16_cache(kernel):
    """As exact as the queries, since products of float32 and bfloat16 are not rounded; softmax weights are."""
    case = CASES["ragged"]
    q, *rest, scale = arrays(case)
    rounded = [x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x for x in rest]
    got = interpreted(kernel, case)(q, *rounded, scale)
    want = dense(case, (q, *(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in rounded), scale))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(got)[real(case)], want[real(case)], atol=2e-2)


def one_more(self, slot, length, depth):
    return VISIBLE(self, slot, length + 1, depth)


def wider(mask, length, window, sinks):
    return NARROW(mask, length, None if window is None else window + 1, sinks)


VISIBLE, NARROW = Blocks.visible, masks.narrow
FAULTS = {
    "length off by one": (Blocks, "visible", one_more),
    "tree window off by one": (masks, "narrow", wider),
    "values not shielded": (masks, "shield", lambda k, v: (k, v)),
    "a block skipped": (Blocks, "count", lambda self, length, count=Blocks.count: count(self, length) - 1),
    "sinks not read": (Blocks, "heads", 0),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kernel", (tpu, gpu), ids=("tpu", "gpu"))
def test_planted_faults_are_found(kernel, fault, monkeypatch):
    case = Case(lengths=(130, 290), used=(8, 7), n=8, heads=2, kv=1, d=32, window=2, sinks=3)
    owner, name, wrong = FAULTS[fault]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(AssertionError):
        check(interpreted(kernel, case), case)


RING_FAULTS = {
    "modulo off by one": ("_lap", lambda self, position: position // (self.slots + 1) * (self.slots + 1)),
    "not around": ("at", lambda self, step, length: jnp.minimum(AT(self, 0, length) + step, self._every - 1)),
    "stale slots seen": ("_sees", lambda self, position, length, depth: position >= 0),
}
AT = Ring.at


@pytest.mark.parametrize("fault", RING_FAULTS)
@pytest.mark.parametrize("kernel", (tpu, gpu), ids=("tpu", "gpu"))
def test_planted_faults_of_a_ring_are_found(kernel, fault, monkeypatch):
    case = Case(lengths=(290, 700), used=(8, 7), n=8, heads=2, kv=1, d=32, slots=256, window=150, ring=True)
    monkeypatch.setattr(Ring, *RING_FAULTS[fault])
    with pytest.raises(AssertionError):
        check(interpreted(kernel, case), case)


@pytest.mark.parametrize("semantics", (None, ("parallel",) * 3), ids=("as it is", "planted race"))
def test_no_race_on_two_cores(semantics, monkeypatch):
    """The interpreter that models DMA and memory, which starts as NaN; blocks of one row on two cores are a race."""
    lengths = (300,) if semantics else (300, 0)
    case = Case(lengths, used=(8, 3)[: len(lengths)], n=8, heads=2, kv=1, d=128, slots=384)
    if semantics:
        params = lambda **_: PARAMS(dimension_semantics=semantics)  # noqa: E731
        monkeypatch.setattr(pltpu, "CompilerParams", params)
    mode = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    call = functools.partial(tpu.tree_attention, interpret=mode, config=tpu.Config(128, 1))
    pltpu.reset_tpu_interpret_mode_state()
    try:
        if semantics:
            with pytest.raises(AssertionError):
                check(call, case)
        else:
            check(call, case)
        assert interpret_pallas_call.races.races_found == bool(semantics)
    finally:
        pltpu.reset_tpu_interpret_mode_state()


PARAMS = pltpu.CompilerParams


def test_configs_that_do_not_fit_are_refused():
    case = CASES["ragged"]
    for config in (tpu.Config(100, 1), tpu.Config(512, 1), tpu.Config(128, 3)):
        with pytest.raises(ValueError, match="config: got Config"):
            check(functools.partial(tpu.tree_attention, config=config), case)
    with pytest.raises(ValueError, match="config: got rows 24"):
        gpu.Config(24, 32, 1)
    with pytest.raises(ValueError, match="config: got shares 0"):
        gpu.Config(16, 32, 0)
