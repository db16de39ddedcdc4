"""Committing: pending rows, staged rows, and 2,000 tokens of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta import Pending, Staged, fold, gated_delta, gather
from tests.pallas_kernels.gated_delta.cases import REGIMES, Case, accept, close, inputs, sequential, step

CALL, FOLD = jax.jit(gated_delta, static_argnames=("scale", "depth")), jax.jit(fold)


def scored(x, *pending, state=None):
    *args, initial = x.args()
    return CALL(*args, initial if state is None else state, *pending, **x.options())


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("channels", (False, True))
def test_every_accepted_node_and_none(regime, channels):
    """Also a leaf that is not the last node, and paths that are not contiguous."""
    x = inputs(Case(used=(12,), n=14, dk=8, hk=1, hv=2, channels=channels, regime=regime))
    got, (_, _, states) = scored(x), sequential(x)
    close(FOLD(jnp.asarray(x.args()[-1]), accept(x, got.u, [-1], 8)), x.state, 1e-7)
    paths = [np.flatnonzero(x.mask[0, i]) for i in range(14)]
    assert any((np.diff(path) > 1).any() for path in paths)
    for node in np.flatnonzero(x.parent[0] > -2):
        close(FOLD(jnp.asarray(x.args()[-1]), accept(x, got.u, [node], 8)), states[:, node], 2e-6)


@pytest.mark.parametrize(
    "case", (Case(), Case(channels=True, dk=8), Case(delta=False)), ids=("tree", "channels", "sum")
)
def test_pending_rows_are_a_fold(case):
    """16 pending rows under a tree; rows that were not accepted may be NaN."""
    x, before = inputs(case, 1), inputs(Case(**{**vars(case), "used": (16, 16), "chain": True}), 2)
    pending = accept(before, scored(before).u, [15, 4], 16)
    hidden = jnp.arange(16) >= jnp.asarray([[16], [5]])
    pending = pending.replace(
        k=jnp.where(hidden[..., None, None], jnp.nan, pending.k),
        u=jnp.where(hidden[:, None, :, None], jnp.nan, pending.u),
    )
    got = scored(x, pending)
    state = fold(jnp.asarray(x.args()[-1]), pending)
    folded = scored(x, state=state)
    close(got.state, state, 1e-6)
    close(got.output, folded.output, 1e-6)
    before.state = x.state
    _, _, states = sequential(before)
    x.state = np.stack([states[0, 15], states[1, 4]])
    if case.delta:  # u was scored on another state
        before_u = scored(before).u
        pending = accept(before, before_u, [15, 4], 16)
        got = scored(x, pending, state=before.args()[-1])
    close(got.state, x.state, 2e-6)
    close(got.output, sequential(x)[0], 2e-6)


def test_one_pending_row_and_a_bfloat16_state():
    x = inputs(Case(used=(16, 16)))
    state = jnp.asarray(x.state, jnp.bfloat16)
    x.state = np.asarray(state, np.float64)
    pending = accept(x, scored(x).u, [0, 0], 1)
    got = scored(x, pending, state=state)
    assert got.state.dtype == jnp.bfloat16
    want = sequential(x)[2][:, 0]
    close(got.state.astype(jnp.float32), want, 4e-3)


@pytest.mark.parametrize("channels", (False, True))
@pytest.mark.parametrize("delta", (False, True))
def test_a_tree_in_parts_is_the_tree(channels, delta):
    """Three parts, each staged before the next; staged rows that nobody sees may be NaN."""
    x = inputs(Case(used=(24, 19), n=24, dk=8, depth=8, channels=channels, delta=delta, regime="fast"))
    want, u, _ = sequential(x)
    q, k, v, decay, beta, mask, state = x.args()
    options, rows, staged = x.options(), [], None
    for start, end in ((0, 7), (7, 8), (8, 24)):
        part = slice(start, end)
        cut = lambda y, part=part: None if y is None else jnp.asarray(y[:, part])  # noqa: E731
        norms = {name: cut(options[name]) for name in ("q_norm", "k_norm")}
        args = (*map(cut, (q, k, v, decay, beta)), mask[:, part, :end], state)
        got = CALL(*args, staged=staged, scale=x.scale, depth=8, **norms)
        rows.append(got)
        parts = (cut(k), norms["k_norm"], got.u, cut(decay))
        join = lambda a, b, axis: jnp.concatenate([a, b], axis)  # noqa: E731
        old = () if staged is None else (staged.k, staged.k_norm, staged.u, staged.decay)
        staged = Staged(
            *(join(a, b, axis) for a, b, axis in zip(old, parts, (1, 1, 2, 1), strict=True)) if old else parts
        )
    close(jnp.concatenate([r.output for r in rows], 1), want, 2e-6)
    close(jnp.concatenate([r.u for r in rows], 2), u, 2e-6)


def test_paths_beyond_the_accepted_part_are_not_read():
    x = inputs(Case(used=(16, 16)))
    u = scored(x).u
    staged = Staged(jnp.asarray(x.k), jnp.asarray(x.k_norm), u.at[:, :, 9].set(jnp.nan), jnp.asarray(x.decay))
    path = jnp.asarray([[0, 9, -7], [1000, 9, 9]])
    got = gather(staged, path, jnp.asarray([1, 0]))
    assert isinstance(got, Pending) and all(np.isfinite(y).all() for y in jax.tree.leaves(got))
    np.testing.assert_array_equal(got.weight[0, :, 0], 1)
    np.testing.assert_array_equal(got.decay[1], 0)
    assert not np.asarray(got.weight[:, :, 1:]).any() and not np.asarray(got.weight[1]).any()


@pytest.mark.parametrize("regime", ("slow", "adv"))
def test_2000_tokens_do_not_drift(regime):
    """Verify and accept over and over in float32, against every accepted token in turn in float64."""
    case = Case(used=(16,), hk=1, hv=2, depth=5, dv=16, regime=regime)
    score = jax.jit(functools.partial(gated_delta, scale=0.25, depth=5))
    state, pending, want, tokens = None, None, None, 0
    rng = np.random.default_rng(3)
    for seed in range(2000):
        x = inputs(case, seed)
        if state is None:
            state, want = jnp.asarray(x.state, jnp.float32), x.state[0]
            pending = accept(x, jnp.zeros((1, 2, 16, 16), jnp.float32), [-1], 5)
        norms = {name: value for name, value in x.options().items() if name != "scale"}
        got = score(*x.args()[:-1], state, pending, **norms)
        node = rng.integers(16)
        state, pending = got.state, accept(x, got.u, [node], 5)
        for i in np.flatnonzero(x.mask[0, node]):
            k = x.k[0, i, 0] * x.k_norm[0, i, 0]
            nodes = [step(want[h], k, k, x.v[0, i, h], x.decay[0, i, h], x.beta[0, i, h], 1.0) for h in range(2)]
            want, tokens = np.stack([node[2] for node in nodes]), tokens + 1
        if tokens >= 2000:
            break
    close(fold(state, pending)[0], want, 3e-6)
