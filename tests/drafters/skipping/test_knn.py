"""KNN-SSD's bank: which domain a prompt has, against loops in numpy, and that each domain's search is its own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_jax.drafters.skipping import knn
from spec_jax.drafters.skipping.drafter import Skipping
from spec_jax.drafters.skipping.knn import Knn, KnnState, nearest
from spec_jax.drafters.skipping.swift import Swift
from spec_jax.engine.round import context_of
from tests.drafters.block import kit
from tests.drafters.skipping.kit import engine, idle, plain

B, N, H, NEAR = 4, 3, 5, 0.5
BANK = Knn(Swift(1), domains=N, near=NEAR)
STATE = BANK.init(idle(None)[0], idle(None)[1], B)


def bank(centre, used, prompt):
    """A state with the given domains and prompts."""
    as32 = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    return KnnState(as32(centre), STATE.searches, jnp.int32(used), as32(prompt), jnp.ones(B, bool))


@jax.jit
def opened(state, voters):
    after = BANK.opened(state, voters)
    return after.centre, after.used, *nearest(after, after.prompt)


def oracle(centre, used, prompt, voters):
    """The domains after at most one more was opened, and each prompt's."""
    angle = lambda x, y: x @ y / np.linalg.norm(x) / np.linalg.norm(y)  # noqa: E731
    domains = list(centre[:used])
    for x, votes in zip(prompt, voters, strict=True):
        if votes and len(domains) < N and max([angle(x, y) for y in domains], default=-9) < NEAR:
            domains.append(x)
            break
    near = [[angle(x, y) for y in domains] for x in prompt]
    return domains, [int(np.argmax(x)) if x else 0 for x in near]


@given(st.integers(0, 2**16), st.integers(0, N), st.lists(st.booleans(), min_size=B, max_size=B))
def test_a_prompt_has_the_nearest_domain_and_a_strange_one_begins_one(seed, used, voters):
    rng = np.random.default_rng(seed)
    centre, prompt = rng.normal(0, 1, (N, H)), rng.normal(0, 1, (B, H))
    domains, mine = oracle(centre, used, prompt, voters)
    got, count, domain, near = jax.device_get(opened(bank(centre, used, prompt), jnp.asarray(voters)))
    assert count == len(domains) and domain.tolist() == mine
    if domains:
        np.testing.assert_allclose(got[:count], domains, rtol=1e-6)
    assert np.isfinite(near).all() == (count > 0)


def started(near, **search):
    """A batch of three prompts under three settings, the second of one token, prefilled."""
    target, params = idle(3)
    e = engine(target, Knn(Swift(1, window=3, **search), domains=N, near=near))
    e = dataclasses.replace(e, target=knn.taps(target))
    return e, *kit.start(e, params, params)


def test_a_prompt_is_the_hidden_state_of_its_last_token_in_the_targets_state():
    e, together, state = started(0.999)
    fresh = e.target.init_state(together.target, 1, 16)
    features, _ = e.target.prefill(together.target, fresh, jnp.array([kit.PROMPTS[0]]), jnp.array([4]))
    known = np.array([len(p) > 1 for p in kit.PROMPTS] * len(kit.SETTINGS))
    np.testing.assert_array_equal(state.drafter.known, known)
    np.testing.assert_allclose(state.drafter.prompt[0], features[0, 3, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_text_is_plain_decodings_and_every_domain_has_a_search_of_its_own():
    """Prompts of one text are one domain; a round tries sets for one domain, on its own rows, and none for the rest."""
    e, together, state = started(0.999, learned=3)

    @kit.jit
    def chosen(state, only):
        context = context_of(state.rows, together.constraint, state.target)
        context = dataclasses.replace(context, active=context.active & only)
        choose = e.drafter.search.choose
        return choose(e.drafter.model, together.target, state.drafter, context)

    state = kit.go_on(e, together, state, 3)
    assert int(state.drafter.used) == 2
    second = jnp.asarray([p == kit.PROMPTS[2] for p in kit.PROMPTS] * len(kit.SETTINGS))
    for only, at in ((~second, 0), (second, 1), (jnp.ones(9, bool), 0)):
        keep, after = chosen(state, only)
        moved = np.asarray(after.searches.count) - np.asarray(state.drafter.searches.count)
        assert np.delete(moved, at).sum() == 0
        assert keep.tolist() == after.searches.keep[at].tolist()
    assert chosen(state, second)[1].searches.count[1] == state.drafter.searches.count[1] + 1

    state = kit.go_on(e, together, state, 2**30)
    np.testing.assert_array_equal(state.rows.tokens, plain(3).tokens)
    assert int(state.rows.counters.accepted.sum()) > 0
    assert int(state.drafter.searches.count[0]) > 1
    empty = e.drafter.search.init(e.drafter.model, together.target, 2)
    after = e.drafter.insert(state.drafter, jnp.array([0, 9]), empty)
    assert (after.known != state.drafter.known).tolist() == [True] + 8 * [False]
    jax.tree.map(np.testing.assert_array_equal, after.searches, state.drafter.searches)


def test_bad_settings_are_refused():
    target, params = idle(None)
    with pytest.raises(ValueError, match="domains: got 0"):
        Knn(Swift(1), domains=0)
    with pytest.raises(ValueError, match=r"near: got 1\.5, takes a cosine"):
        Knn(Swift(1), near=1.5)
    with pytest.raises(ValueError, match=r"skips: got 4, takes an integer of 1 \.\. 3"):
        Skipping(target, Knn(Swift(4)), 3)
    with pytest.raises(ValueError, match="target: got one without the tap of its last layer alone"):
        kit.start(engine(target, Knn(Swift(1))), params, params)
