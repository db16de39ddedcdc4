"""SWIFT's search: what a set scores, what is tried next, and that the layer that does nothing is found."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.drafters.skipping.swift import Swift, improvement, matchness, random_sets
from spec_jax.engine.engine import Engine
from spec_jax.engine.round import context_of
from spec_jax.models import views
from spec_jax.models.config import LlamaConfig
from spec_jax.models.llama import Llama
from spec_jax.tree import Tree
from tests.drafters.block import kit
from tests.drafters.skipping.kit import LAYERS, engine, idle, plain

WINDOW = 6


def test_a_sets_score_is_the_share_of_tokens_that_it_would_have_chosen():
    """Against a state that was filled anew up to the window, row by row."""
    target, params = idle(None)
    e = Engine(target, 24, prefill_chunk=8)
    together, state = kit.start(e, None, params)
    state = kit.go_on(e, together, state, 9)
    keep = jnp.asarray([True, False, True, True, True])
    context = context_of(state.rows, together.constraint, state.target)
    right = []
    for row in range(9):
        n = int(state.rows.length[row])
        begin, text = n - 1 - WINDOW, state.rows.tokens[row : row + 1]
        fresh = target.init_state(params, 1, 40)
        fresh = target.prefill(params, fresh, text[:, :begin], jnp.array([begin]))[1] if begin else fresh
        tree = Tree(text[:, begin : n - 1], jnp.arange(-1, WINDOW - 1)[None], jnp.ones((1, WINDOW), bool))
        z = target.score(views.masked(params, keep), fresh, tree)[0].logits[0]
        right.append(np.asarray(z.argmax(-1) == text[0, begin + 1 : n]))
    right = np.stack(right)
    assert 0 < right.mean() < 1
    for rows in (range(9), [0, 4], [8]):
        some = jnp.zeros(9, bool).at[jnp.asarray(rows)].set(True)
        got = matchness(target, params, keep, context, some, WINDOW)
        np.testing.assert_allclose(got, right[np.asarray(rows)].mean(), rtol=1e-6)
    whole = matchness(target, params, jnp.ones(LAYERS, bool), context, jnp.arange(9) < 3, WINDOW)
    assert whole == 1, "the greedy rows' text is the whole model's own choice"


def test_expected_improvement_is_that_of_the_gaussian_process():
    rng = np.random.default_rng(0)
    tried, sets = (np.asarray(random_sets(jax.random.key(i), n, 8, 3)) for i, n in ((0, 7), (1, 5)))
    scores, seen, best = rng.uniform(0, 1, 7).astype(np.float32), np.arange(7) < 5, 0.6
    got = improvement(*(jnp.asarray(x) for x in (tried, scores, seen, sets)), jnp.float32(best))

    x, y = tried[seen], scores[seen].astype(float)
    mean, spread = y.mean(), y.std() + 1e-3
    k = lambda a, b: np.exp(-(a[:, None] != b[None]).sum(-1) / 3)  # noqa: E731
    gram = k(x, x) + 1e-2 * np.eye(5)
    mu = mean + spread * k(sets, x) @ np.linalg.solve(gram, (y - mean) / spread)
    var = 1 - np.einsum("ij,jk,ik->i", k(sets, x), np.linalg.inv(gram), k(sets, x))
    sigma = spread * np.sqrt(var)
    z = (mu - best) / sigma
    cdf = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in z])
    want = sigma * (z * cdf + np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi))
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-6)
    assert np.ptp(want) > 0.01
    blind = improvement(*(jnp.asarray(x) for x in (tried, scores, np.ones(7, bool), sets)), jnp.float32(best))
    assert np.abs(np.asarray(blind) - want).max() > 1e-3, "sets that were not tried would count"


def test_random_sets_keep_the_ends_and_skip_every_other_layer_at_times():
    sets = np.asarray(random_sets(jax.random.key(0), 200, 7, 3))
    assert (sets.sum(1) == 4).all() and sets[:, [0, -1]].all()
    np.testing.assert_allclose(sets[:, 1:-1].mean(0), 0.4, atol=0.15)


def test_what_was_learned_is_tried_in_its_turn():
    search = Swift(2, learned=4, pool=16, memory=8)
    state = search.init(Llama(_config()), idle(None)[1], 1)
    target = np.array([True, False, False, True, True, True, True, True])

    @jax.jit
    def step(state):
        keep, after = search.candidate(state)
        return search.told(after, keep, (keep == jnp.asarray(target)).mean()), keep

    tried = []
    for _ in range(40):
        before = state
        state, keep = step(state)
        tried.append(np.asarray(keep))
        score = float((tried[-1] == target).mean())
        assert float(state.best) == max(float(before.best), score)
        assert int(state.stale) == (0 if score > float(before.best) else int(before.stale) + 1)
    agreed = np.array([(keep == target).sum() for keep in tried])
    assert agreed[3::4].mean() > np.delete(agreed, np.arange(3, 40, 4)).mean() + 0.5
    assert (np.asarray(state.keep) == tried[int(np.argmax(agreed))]).all()


def _config():
    return LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=8, num_heads=2, num_kv_heads=2, head_dim=4
    )


def test_text_is_plain_decodings_and_the_layer_that_does_nothing_is_found():
    target, params = idle(3)
    e = engine(target, Swift(1, window=3, learned=3))
    together, state = kit.start(e, params, params)
    state = kit.go_on(e, together, state, 2**30)
    np.testing.assert_array_equal(state.rows.tokens, plain(3).tokens)
    assert int(state.rows.counters.accepted.sum()) > 0
    tried = int(state.drafter.count)
    assert tried > 1 and state.drafter.keep.tolist() == [True, True, True, False, True]


@pytest.mark.parametrize(("enough", "most", "patience"), [(0.01, 1000, 300), (1.0, 2, 300), (1.0, 1000, 1)])
def test_the_search_ends(enough, most, patience):
    target, params = idle(None)
    e = engine(target, Swift(3, window=2, enough=enough, most=most, patience=patience))
    got = kit.start(e, params, params)
    state = kit.go_on(e, *got, 2**30)
    np.testing.assert_array_equal(state.rows.tokens, plain(None).tokens)
    rounds = int(state.rows.counters.rounds.max())
    assert 0 < int(state.drafter.count) < rounds - 4


def test_bad_settings_are_refused():
    target, params = idle(None)
    with pytest.raises(ValueError, match="window: got 0"):
        Swift(1, window=0)
    with pytest.raises(ValueError, match="enough: got 2"):
        Swift(1, enough=2)
    with pytest.raises(ValueError, match="skips: got 0"):
        engine(target, Swift(0))
    near = dataclasses.replace(target, config=dataclasses.replace(target.config, sliding_window=4))
    with pytest.raises(ValueError, match="model: got one with a window of 4"):
        engine(near, Swift(1))
