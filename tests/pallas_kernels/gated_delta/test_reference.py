"""The XLA form against the recurrence in float64, and what must hold of any implementation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta import gated_delta
from tests.pallas_kernels.gated_delta.cases import (
    REGIMES,
    Case,
    ancestors,
    check,
    close,
    inputs,
    random_parents,
    sequential,
)

KINDS = {
    "tree": Case(),
    "chain": Case(n=16, used=(16, 3), chain=True),
    "deep": Case(n=40, used=(40,), depth=33),
    "no norms, three value heads": Case(hk=1, hv=3, norms=False),
    "one value head per key head": Case(hk=2, hv=2, dk=8, dv=32),
    "four value heads per key head": Case(hk=1, hv=4),
    "one node": Case(n=1, used=(1, 1), depth=1),
    "siblings": Case(n=5, used=(5, 2), depth=1),
    "two levels": Case(n=9, used=(9, 9), depth=2),
    "beta up to 2": Case(most_beta=2.0),
    "per channel": Case(channels=True, dk=8),
    "no delta rule": Case(delta=False),
    "per channel, no delta rule": Case(delta=False, channels=True, dk=8),
}


CALL = jax.jit(gated_delta, static_argnames=("scale", "depth"))


def scored(x, **options):
    return CALL(*x.args(), **x.options(), **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("regime", REGIMES)
def test_equals_the_recurrence(kind, regime):
    check(gated_delta, dataclasses.replace(KINDS[kind], regime=regime), shared=True)


@pytest.mark.parametrize("kind", ("tree", "deep", "per channel", "no delta rule"))
def test_is_exact_in_float64(kind):
    with jax.enable_x64(True):
        for seed, regime in enumerate(REGIMES):
            check(gated_delta, dataclasses.replace(KINDS[kind], regime=regime), seed, 1e-13, "float64", shared=True)


def test_bfloat16_rows_are_taken_as_they_are():
    """Raw rows are what they are; only the output is rounded, and u is not."""
    x = inputs(Case(regime="hicorr"))
    for name in ("q", "k", "v"):
        setattr(x, name, np.asarray(jnp.asarray(getattr(x, name), jnp.bfloat16), np.float64))
    q, k, v, *rest = x.args()
    got = CALL(*(jnp.asarray(y, jnp.bfloat16) for y in (q, k, v)), *rest, **x.options())
    out, u, _ = sequential(x)
    assert got.output.dtype == jnp.bfloat16 and got.u.dtype == jnp.float32
    close(got.u, u, 2e-6)
    close(got.output.astype(jnp.float32), out, 4e-3)


def test_the_order_of_nodes_does_not_matter():
    x = inputs(Case(used=(16,), regime="fast"))
    order = np.argsort(x.mask[0].sum(1), kind="stable")  # by depth: another topological order, unused nodes first
    assert (order != np.arange(16)).any()
    again = dataclasses.replace(x, mask=x.mask[:, order][:, :, order], parent=x.parent)
    for name in ("q", "k", "v", "decay", "beta", "q_norm", "k_norm"):
        setattr(again, name, getattr(x, name)[:, order])
    one, two = (scored(y) for y in (x, again))
    close(two.output, np.asarray(one.output)[:, order], 1e-6)
    close(two.u, np.asarray(one.u)[:, :, order], 1e-6)


@pytest.mark.parametrize("name", ("k", "v", "decay", "beta", "k_norm", "q"))
@pytest.mark.parametrize("value", (np.nan, np.inf))
def test_nan_reaches_those_that_see_it(name, value):
    """A broken leaf breaks nobody else, a broken inner node its descendants: 0 times NaN is not 0."""
    x = inputs(Case(used=(12,), n=16, depth=4))
    want, _, _ = sequential(x)
    inner = next(i for i in range(16) if x.mask[0, :, i].sum() > 2 and not x.mask[0, :, i].all())
    leaf = next(i for i in range(16) if x.mask[0, :, i].sum() == 1 and not x.mask[0, i, inner])
    for node in (inner, leaf):
        getattr(x, name)[0, node, 0, ...] = value
    seen = x.mask[0, :, [inner, leaf]].any(0)
    if name == "q":
        seen = np.isin(np.arange(16), (inner, leaf))
    first = np.arange(4) < (1 if name in ("v", "decay", "beta") else 2)  # value heads of the broken head
    got = scored(x)
    broken = ~np.isfinite(np.asarray(got.output)[0]).all(-1)
    np.testing.assert_array_equal(broken, seen[:, None] & first)
    close(np.where(broken[None, ..., None], 0, got.output), np.where(broken[None, ..., None], 0, want), 2e-6)
    if name != "q":
        np.testing.assert_array_equal(np.isnan(got.u[0]).all(-1).T, broken)
    np.testing.assert_array_equal(np.asarray(got.output)[0, ~x.mask[0].any(-1)], 0)


def test_a_node_deeper_than_it_was_said_is_broken():
    x = inputs(Case(used=(16,), depth=6))
    got = scored(x, depth=4)
    deep = x.mask[0].sum(1) > 4
    assert deep.any()
    np.testing.assert_array_equal(np.isnan(got.output[0]).all((-1, -2)), deep)
    close(np.where(deep[:, None, None], 0, got.output[0]), np.where(deep[:, None, None], 0, sequential(x)[0][0]), 2e-6)


def test_a_decay_of_minus_infinity_forgets():
    for channels in (False, True):
        x = inputs(Case(channels=channels))
        x.decay[:, 5] = -np.inf
        got = scored(x)
        close(got.output, sequential(x)[0], 2e-6)


def test_rows_of_a_batch_do_not_meet():
    x = inputs(Case(used=(16, 7, 1, 0), regime="hicorr"))
    got = scored(x)
    close(got.output, sequential(x)[0], 2e-6)
    for row in range(4):
        fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
        cut = {name: y[row : row + 1] if isinstance(y, np.ndarray) else y for name, y in fields.items()}
        alone = scored(dataclasses.replace(x, **cut))
        close(alone.output, got.output[row : row + 1], 1e-6)
    np.testing.assert_array_equal(got.output[3], 0)
    np.testing.assert_array_equal(got.u[3], 0)


def test_random_trees_are_what_they_should_be():
    rng = np.random.default_rng(0)
    parent = random_parents(rng, 12, 16, 5)
    mask = ancestors(parent)
    assert (parent > -2).sum() == 12 and mask.sum(1).max() == 5 and (parent < np.arange(16)).all()
    deepest = np.flatnonzero(mask[mask.sum(1).argmax()])
    assert (np.diff(deepest) > 1).any()  # the path is not contiguous
