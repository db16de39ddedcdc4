"""CLaSp's dynamic programme against loops in numpy, and its drafts: the layer that does nothing is left out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_jax.drafters.skipping import clasp
from spec_jax.drafters.skipping.clasp import Clasp, fewest_changes, through
from spec_jax.drafters.skipping.drafter import Skipping, spread
from spec_jax.engine.round import context_of
from tests.drafters.block import kit
from tests.drafters.skipping.kit import LAYERS, engine, idle, plain

B, L, H = 2, 6, 5


def cosine(x, y):
    return (x * y).sum(-1) / np.maximum(np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1), 1e-12)


def oracle(layer, hidden, weight, skips, compare=True):
    """CLaSp's algorithm 1 as it reads: g(i, j) and the way to it, one state after another."""
    g, way = {(0, 0): hidden[:, 0]}, {}
    for i in range(1, hidden.shape[1]):
        for j in range(min(i, skips) + 1):
            found = []
            if (i - 1, j) in g:
                found.append((layer(i - 1, g[i - 1, j]), True))
            if (i - 1, j - 1) in g:
                found.append((g[i - 1, j - 1], False))
            near = [weight @ cosine(x, hidden[:, i]) for x, _ in found]
            g[i, j], way[i, j] = found[int(np.argmax(near)) if compare else 0]
    keep, j = [], skips
    for i in range(hidden.shape[1] - 1, 0, -1):
        keep.append(way[i, j])
        j -= not way[i, j]
    return keep[::-1]


def layers(seed):
    rng = np.random.default_rng(seed)
    size = rng.uniform(0.02, 1.5, L)
    maps = size[:, None, None] * rng.normal(0, 1, (L, H, H))
    hidden = [rng.normal(0, 1, (B, H))]
    for m in maps:
        hidden.append(hidden[-1] + np.tanh(hidden[-1] @ m))
    return maps, np.stack(hidden, axis=1)


@jax.jit
def found(maps, hidden, weight):
    layer = lambda i, x: x + jnp.tanh(x @ maps[i])  # noqa: E731
    return [fewest_changes(layer, hidden, weight, skips) for skips in range(L + 1)]


@settings(max_examples=40)
@given(st.integers(0, 2**16), st.sampled_from([(1.0, 1.0), (1.0, 0.0)]))
def test_the_programme_is_the_papers(seed, weight):
    maps, hidden = layers(seed)
    layer = lambda i, x: x + np.tanh(x @ maps[i])  # noqa: E731
    ours = jax.device_get(found(*(jnp.asarray(x, jnp.float32) for x in (maps, hidden, weight))))
    for skips, keep in enumerate(ours):
        assert keep.sum() == L - skips
        assert keep.tolist() == oracle(layer, hidden, np.array(weight), skips)


def test_a_programme_that_does_not_compare_is_told_from_it():
    maps, hidden = layers(3)
    layer = lambda i, x: x + np.tanh(x @ maps[i])  # noqa: E731
    right, wrong = (oracle(layer, hidden, np.ones(B), 3, compare) for compare in (True, False))
    assert right != wrong
    got = found(*(jnp.asarray(x, jnp.float32) for x in (maps, hidden, np.ones(B))))[3]
    assert got.tolist() == right


def prefilled(layer, rounds=0):
    target, params = idle(layer)
    e = engine(target, Clasp(1, every=1))
    e = dataclasses.replace(e, target=clasp.taps(target))
    together, state = kit.start(e, params, params)
    return e, together, kit.go_on(e, together, state, rounds) if rounds else state


def test_what_runs_through_all_layers_is_what_the_target_computed():
    """The last token of the state, seen from before it; also after rounds that accepted different lengths."""
    for rounds in (0, 2):
        e, together, state = prefilled(2, rounds)
        rows = np.flatnonzero(np.asarray(state.drafter.known & state.rows.running))
        assert len(rows) > 4
        run = through(e.drafter.model, together.target, state.target, 2)
        x = jnp.broadcast_to(state.drafter.hidden[:, :1], (9, 2, kit.H))
        for i in range(LAYERS):
            x = run(i, x)
            want = np.asarray(state.drafter.hidden[:, i + 1, None])
            np.testing.assert_allclose(np.asarray(x)[rows], np.broadcast_to(want, x.shape)[rows], atol=1e-4)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_the_layer_that_does_nothing_is_left_out(layer):
    e, together, state = prefilled(layer)

    @kit.jit
    def chosen(state):
        context = context_of(state.rows, together.constraint, state.target)
        return e.drafter.search.choose(e.drafter.model, together.target, state.drafter, context)[0]

    assert chosen(state).tolist() == [i != layer for i in range(LAYERS)]


@pytest.mark.parametrize("layer", (2, None))
def test_text_is_plain_decodings(layer):
    """With a layer that does nothing, all that is drafted is accepted, greedy or sampled, from the first round on."""
    target, params = idle(layer)
    e = engine(target, Clasp(1 if layer else 2, every=2))
    got = kit.decoded(dataclasses.replace(e, target=clasp.taps(target)), params, params)
    np.testing.assert_array_equal(got.tokens, plain(layer).tokens)
    c = jax.device_get(got.counters)
    long = np.array([len(p) > 1 for p in kit.PROMPTS] * len(kit.SETTINGS))
    if layer:
        assert (c.accepted[long] == c.drafted[long]).all() and c.drafted.sum() > c.rounds.sum()
    else:
        assert 0 < c.accepted.sum() < c.drafted.sum()


def test_a_set_stays_for_some_rounds():
    target, params = idle(None)
    e = dataclasses.replace(engine(target, Clasp(2, every=3)), target=clasp.taps(target))
    together, state = kit.start(e, params, params)
    ages = []
    for _ in range(5):
        state = kit.go_on(e, together, state, 1)
        ages.append(int(state.drafter.age))
    assert ages == [1, 2, 3, 1, 2]


def test_sets_to_begin_with():
    assert spread(3, 1).tolist() == [True, False, True]
    for skips in range(1, 9):
        keep = spread(10, skips)
        assert (~keep).sum() == skips and keep[0] and keep[-1]


def test_bad_settings_are_refused():
    target, params = idle(None)
    with pytest.raises(ValueError, match=r"skips: got 4, takes an integer of 1 \.\. 3"):
        Skipping(target, Clasp(4), 3)
    with pytest.raises(ValueError, match="every: got 0"):
        Clasp(1, every=0)
    with pytest.raises(ValueError, match="k: got 0"):
        Skipping(target, Clasp(1), 0)
    with pytest.raises((ValueError, TypeError), match="model"):
        Skipping("a name", Clasp(1), 3)  # pyright: ignore
    with pytest.raises(ValueError, match="target: got one without taps"):
        kit.start(engine(target, Clasp(1)), params, params)
    e, together, state = prefilled(None)
    with pytest.raises(ValueError, match="context: got one without the target's state"):
        e.drafter.propose(params, state.drafter, context_of(state.rows, together.constraint))
