"""Stopping rules against every count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_jax.control.cost import CPU
from spec_jax.topology.stop import Likely, convex_cost, linear_cost, marginal, most, round_up

N = 12
MARGINAL, MOST = jax.jit(marginal), jax.jit(most)
SEED = st.integers(0, 2**16)


def chances(seed, rows=1):
    rng = np.random.default_rng(seed)
    return np.concatenate([[rows], -np.sort(-(rng.uniform(0, rows, N - 1) ** rng.integers(1, 4)))])


def convex(seed):
    rng = np.random.default_rng(seed)
    return 1 + np.concatenate([[0], np.cumsum(np.sort(rng.uniform(0, 0.4, N - 1)))])


@given(SEED, SEED, st.sampled_from([1, 3]))
def test_for_convex_costs_the_first_peak_is_the_best_count(one, two, rows):
    chance, cost = chances(one, rows), convex(two)
    rate = np.cumsum(chance) / cost
    count = int(MARGINAL(jnp.asarray(chance), jnp.asarray(cost)))
    assert rate[count - 1] == pytest.approx(rate.max(), rel=1e-5)
    assert rate[int(MOST(jnp.asarray(chance), jnp.asarray(cost))) - 1] == pytest.approx(rate.max(), rel=1e-5)


@given(SEED, SEED)
def test_it_is_the_rule_of_three_papers(one, two):
    chance, cost = chances(one), convex(two)
    smart = cast = caddtree = 1
    while caddtree < N and chance[: caddtree + 1].sum() / cost[caddtree] > chance[:caddtree].sum() / cost[caddtree - 1]:
        caddtree += 1
    line = lambda n: 0.8 + 0.2 * n  # noqa: E731
    while cast < N and chance[cast] >= chance[:cast].sum() / line(cast) * 0.2:
        cast += 1
    slope = np.diff(cost)
    while smart < N and chance[smart] / slope[smart - 1] > chance[:smart].sum() / cost[smart - 1]:
        smart += 1
    count = int(MARGINAL(jnp.asarray(chance), jnp.asarray(cost)))
    assert smart == caddtree and abs(count - smart) <= _tie(chance, cost)
    straight = line(np.arange(1, N + 1))
    assert abs(int(MARGINAL(jnp.asarray(chance), jnp.asarray(straight))) - cast) <= _tie(chance, straight)


def _tie(chance, cost):
    """N where two counts are as good as each other in float32, else 0."""
    gap = chance[1:] * cost[:-1] / (np.cumsum(chance)[:-1] * np.diff(cost)) - 1
    return N if (abs(gap) < 1e-5).any() else 0


def test_a_cost_that_jumps_hides_what_is_behind_it():
    """Why `most` is there: at a kernel boundary the first peak is not the best count."""
    chance, cost = jnp.full(6, 0.9).at[0].set(1.0), jnp.array([1, 1, 1, 3.0, 3, 3])
    assert int(MARGINAL(chance, cost)) == 3 and int(MOST(chance, cost)) == 3
    cheap = jnp.array([1, 1.9, 1.9, 1.9, 1.9, 1.9])
    assert int(MARGINAL(chance * 0.9, cheap)) == 1 and int(MOST(chance * 0.9, cheap)) == 6


@given(SEED, st.integers(1, N - 1))
def test_no_node_behind_the_stop_is_looked_at(seed, kept):
    """So it may stop draws whose chances are said before their tokens are known."""
    chance, cost = chances(seed), convex(seed + 1)
    count = int(MARGINAL(jnp.asarray(chance), jnp.asarray(cost)))
    changed = np.concatenate([chance[: kept + 1], np.random.default_rng(seed).uniform(0, 1, N - kept - 1)])[:N]
    again = int(MARGINAL(jnp.asarray(changed), jnp.asarray(cost)))
    assert again == count if count <= kept else again > kept or _tie(chance, cost)


def test_likely():
    chance = jnp.array([1.0, 0.9, 0.4, 0.41, 0.1])
    assert int(Likely(0.4)(chance, chance)) == 4 and int(Likely(0.95)(chance, chance)) == 1
    assert int(Likely(0.0)(chance, chance)) == 5 and hash(Likely(0.4)) == hash(Likely(0.4))


@pytest.mark.parametrize(("count", "which"), [(1, 0), (2, 1), (4, 1), (5, 2), (8, 2), (9, 2)])
def test_round_up(count, which):
    assert int(round_up(jnp.int32(count), (1, 4, 8))) == which


@given(SEED)
def test_linear_cost(seed):
    rng = np.random.default_rng(seed)
    x = np.sort(rng.choice(200, 6, replace=False)) + 1
    base, slope = linear_cost(x.tolist(), (3 + 0.25 * x).tolist())
    assert (base, slope) == (pytest.approx(3), pytest.approx(0.25))
    assert linear_cost([1, 2], [2.0, 1.0]) == (1.5, 0.0) and linear_cost([4], [2.0]) == (2.0, 0.0)


@given(SEED)
def test_convex_cost(seed):
    rng = np.random.default_rng(seed)
    x = np.sort(rng.choice(200, 7, replace=False)) + 1
    y = rng.uniform(1, 2, 7) + 0.02 * x
    fitted = np.asarray(convex_cost(x.tolist(), y.tolist()))
    slopes = np.diff(fitted) / np.diff(x)
    assert (slopes >= -1e-9).all() and (np.diff(slopes) >= -1e-9).all()
    assert fitted.mean() == pytest.approx(y.mean())
    own = np.sort(rng.uniform(0, 1, 6))
    line = np.concatenate([[1.0], 1 + np.cumsum(own * np.diff(x))])
    assert np.asarray(convex_cost(x.tolist(), line.tolist())) == pytest.approx(line)


def test_the_measured_table_of_this_machine_made_convex():
    fitted = convex_cost(CPU.nodes, CPU.seconds)
    assert len(fitted) == len(CPU.nodes) and fitted != pytest.approx(CPU.seconds)


@pytest.mark.parametrize("bad", [([2, 1], [1.0, 2.0]), ([1, 2], [1.0]), ([], [])])
def test_tables_that_are_none_are_refused(bad):
    for f in (linear_cost, convex_cost):
        with pytest.raises(ValueError, match="nodes: got"):
            f(*bad)
