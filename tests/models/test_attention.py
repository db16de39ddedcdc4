"""The ring of a layer with a sliding window: its size, which positions its slots hold, and commits around it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.models import attention


@pytest.mark.parametrize(
    ("slots", "window", "kept"),
    [(500, None, 500), (500, 1, 8), (500, 6, 8), (500, 9, 8), (500, 10, 16), (500, 121, 120), (500, 122, 128)]
    + [(9000, 2047, 2048), (9000, 4096, 4096), (9000, 4098, 4224), (300, 4096, 300), (5, 6, 5)],
)
def test_kept_slots(slots, window, kept):
    assert attention.kept_slots(slots, window) == kept
    assert window is None or kept == slots or window - 1 <= kept < window - 1 + 128


@pytest.mark.parametrize(("slots", "sinks"), [(1, 0), (8, 0), (7, 2), (12, 11), (5, 5)])
def test_held_positions(slots, sinks):
    last, want = np.full(slots, -1), []
    for position in range(50):
        want.append(last.copy())
        if sinks < slots or position < slots:
            last[position if position < slots else sinks + (position - sinks) % (slots - sinks)] = position
    got = attention.held(jnp.arange(slots), jnp.arange(50)[:, None], slots, sinks)
    np.testing.assert_array_equal(got, want)


commit = jax.jit(attention.commit_ring, static_argnames="sinks")


@pytest.mark.parametrize("batch", (1, 3))
@pytest.mark.parametrize(("slots", "m", "sinks"), [(8, 4, 0), (8, 8, 0), (8, 11, 0), (7, 4, 2), (7, 6, 3), (7, 11, 2)])
def test_commits_around_a_ring(slots, m, sinks, batch):
    """Many commits along random paths: every slot holds what was last accepted for it, and nothing else is written."""
    rng = np.random.default_rng(slots * m)
    cache, length = jnp.full((batch, 2, slots, 3), jnp.nan), np.zeros(batch, int)
    want = np.full((batch, slots), np.nan)
    for _ in range(12):
        staged, path = rng.normal(size=(batch, 2, m, 3)).astype(np.float32), rng.integers(0, m, (batch, m))
        count = rng.integers(0, m + 1, batch)
        for row in range(batch):
            for node in path[row, : count[row]]:
                at = length[row]
                want[row, at if at < slots else sinks + (at - sinks) % (slots - sinks)] = staged[row, 1, node, 2]
                length[row] += 1
        given = (jnp.asarray(x) for x in (staged, path, length - count, count))
        cache = commit(cache, *given, sinks=sinks)
        np.testing.assert_array_equal(cache[:, 1, :, 2], want)
