"""Sparse experts in every form: values and gradients are those of a loop over rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.models import experts
from spec_jax.models.experts import Experts, Mlp
from spec_jax.models.linear import Dense

ROWS, HIDDEN, COUNT, INNER, K = 13, 8, 4, 6, 2


def made(seed=2):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    shared = Mlp(Dense(normal(HIDDEN, 5)), Dense(normal(HIDDEN, 5)), Dense(normal(5, HIDDEN)))
    wide = lambda: normal(COUNT, HIDDEN, INNER)  # noqa: E731
    maps = (normal(HIDDEN, COUNT), wide(), wide(), normal(COUNT, INNER, HIDDEN))
    return Experts(*maps, shared, normal(HIDDEN, 1)), normal(ROWS, HIDDEN)


def mixed(form, leaves, x):
    return experts.mix(leaves, x, experts.route(leaves, x, K, True), form)


def by_row(leaves, x):
    """The layer row by row, expert by expert, in float64."""
    f = lambda a: np.asarray(a, np.float64)  # noqa: E731
    silu = lambda a: a / (1 + np.exp(-a))  # noqa: E731

    def ffn(row, gate, up, down):
        return (silu(row @ f(gate)) * (row @ f(up))) @ f(down)

    out = []
    for row in f(x):
        chance = np.exp(row @ f(leaves.router))
        best = np.argsort(-chance)[:K]
        own = sum(chance[e] / chance[best].sum() * ffn(row, leaves.gate[e], leaves.up[e], leaves.down[e]) for e in best)
        s = leaves.shared
        maps = (s.gate.kernel, s.up.kernel, s.down.kernel)
        out.append(own + ffn(row, *maps) / (1 + np.exp(-(row @ f(leaves.shared_gate)))))
    return np.stack(out)


@pytest.mark.parametrize(
    ("form", "block"), [("dense", 128), ("loop", 128), ("ragged", 128), ("blocks", 1), ("blocks", 3), ("blocks", 128)]
)
def test_forms_are_a_loop_over_rows(form, block, monkeypatch):
    monkeypatch.setattr(experts, "_BLOCK", block)
    leaves, x = made()
    np.testing.assert_allclose(mixed(form, leaves, x), by_row(leaves, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["dense", "loop", "ragged", "blocks"])
def test_experts_of_another_dtype_are_taken_in_that_of_the_rows(form):
    leaves, x = made()
    x = x.astype(jnp.bfloat16)
    cast = lambda tree: jax.tree.map(lambda y: y.astype(jnp.bfloat16), tree)  # noqa: E731
    mixed_dtypes = dataclasses.replace(cast(leaves), router=leaves.router, gate=leaves.gate, down=leaves.down)
    np.testing.assert_array_equal(*(mixed(form, some, x).astype(jnp.float32) for some in (cast(leaves), mixed_dtypes)))


@pytest.mark.parametrize(("form", "block"), [("ragged", 128), ("blocks", 3), ("blocks", 128)])
def test_gradients_are_those_of_every_expert_applied(form, block, monkeypatch):
    monkeypatch.setattr(experts, "_BLOCK", block)
    leaves, x = made()
    weight = jnp.asarray(np.random.default_rng(3).normal(size=x.shape), jnp.float32)
    slope = lambda f: jax.grad(lambda leaves, x: (mixed(f, leaves, x) * weight).sum(), (0, 1))(leaves, x)  # noqa: E731
    got, want = slope(form), slope("dense")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_an_expert_that_all_rows_or_none_choose():
    leaves, x = made()
    for column in (0, 3):
        one = leaves.router.at[:, column].set(0).at[0, column].set(50)
        biased = dataclasses.replace(leaves, router=one)
        rows = x.at[:, 0].set(1.0)
        assert (experts.route(biased, rows, K, True).index[:, 0] == column).all()
        np.testing.assert_allclose(mixed("blocks", biased, rows), mixed("dense", biased, rows), rtol=1e-4, atol=1e-4)


def test_balance_is_one_when_experts_are_used_alike():
    leaves, _ = made()
    sure = Experts(jnp.eye(HIDDEN)[:, :COUNT] * 20, leaves.gate, leaves.up, leaves.down)
    balance = lambda x: experts.balance(experts.route(sure, x, 1, True))  # noqa: E731
    rows = jnp.eye(COUNT, HIDDEN)
    np.testing.assert_allclose(balance(rows), 1, rtol=1e-4)
    np.testing.assert_allclose(balance(jnp.tile(rows[:1], (4, 1))), COUNT, rtol=1e-4)


@pytest.mark.parametrize("crowded", [False, True])
def test_devices_that_take_their_choices_in_turns_drop_none(crowded, monkeypatch):
    """A device for each expert, with room for 7 of 13 rows a turn; crowded: all rows choose the first."""
    monkeypatch.setattr(experts, "_BLOCK", 1)
    leaves, x = made()
    routing = experts.route(leaves, x, 1, False)
    if crowded:
        routing = dataclasses.replace(routing, index=jnp.zeros_like(routing.index))
    total = 0
    for device in range(COUNT):
        cut = {name: getattr(leaves, name)[device : device + 1] for name in ("gate", "up", "down")}
        mine = routing.index == device
        own = experts.Routing(jnp.where(mine, 0, 1), jnp.where(mine, routing.weight, 0), routing.chance)
        total += experts._ragged_turns(dataclasses.replace(leaves, **cut), x, own)
    np.testing.assert_allclose(total, experts._dense(leaves, x, routing), rtol=1e-5, atol=1e-5)
