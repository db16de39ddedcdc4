"""Spine and grafted drafts of both retrieval sources against their parts, and in the engine."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_jax.drafters.drafter import Drafter
from spec_jax.drafters.goose import Goose
from spec_jax.drafters.grafted import Grafted
from spec_jax.drafters.recycling import Adjacency, Recycling
from spec_jax.drafters.several import States
from spec_jax.drafters.suffix import Suffix
from tests.drafters import kit

RATES = (0.5, 0.2, 0.1)
TABLE, MATCH = Recycling(kit.WORDS, 8, RATES, 3), Suffix(9, 2, 6, 20, 1)
DRAFTERS = {"goose": Goose(TABLE, MATCH, 12), "grafted": Grafted(TABLE, MATCH, 12, 4)}
TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=kit.SIZE), min_size=2, max_size=2)


@functools.cache
def proposer(drafter):
    return jax.jit(lambda state, c: drafter.propose(None, state, c)[0])


def state_of(drafter, seed, known=True):
    match = drafter.init(None, 2, kit.SIZE).states[1]
    rows = np.random.default_rng(seed).permuted(np.tile(np.arange(kit.WORDS), (kit.WORDS, 1)), axis=1)[:, :3]
    return States((Adjacency(jnp.asarray(rows if known else np.full_like(rows, -1), jnp.int32)), match))


def check(draft, row, room):
    paths, chances = kit.paths(draft, row), kit.chances(draft, row)
    assert len({path for path, _ in paths}) == len(paths)
    assert all(len(path) < room for path, _ in paths)
    assert all(a >= b * (1 - 1e-5) for a, b in zip([1, *chances], chances, strict=False))
    return dict(zip([path for path, _ in paths], chances, strict=True))


@given(TEXTS, st.integers(0, 2**16), st.sampled_from([1, 2, 3, 24]), st.sampled_from(list(DRAFTERS)))
def test_a_joined_draft(texts, seed, room, name):
    d, c = DRAFTERS[name], kit.context(texts, room=room)
    state = state_of(d, seed)
    table, match = (proposer(p)(s, c) for p, s in zip((TABLE, MATCH), state.states, strict=True))
    draft = jax.device_get(proposer(d)(state, c))
    assert draft.tree.tokens.shape == (2, 12) and draft.proposal == "point"
    for row in range(2):
        known, spine, wide = check(draft, row, room), check(match, row, room), check(table, row, room)
        assert draft.tree.tokens[row, 0] == texts[row][-1]
        if name == "grafted":
            kept = {path for path, _ in kit.paths(table, row)[:3]}
            assert kept <= set(known) <= kept | set(spine) and len(known) == min(11, len(kept | set(spine)))
        else:
            left = 1 - sum(chance for path, chance in spine.items() if len(path) == 1)
            for path, chance in known.items():
                if path in spine or path in wide:
                    assert chance >= max(spine.get(path, 0), left * wide.get(path, 0)) * (1 - 1e-4)
                else:
                    assert path[:-1] in spine
                if path in spine and path not in wide:
                    assert chance == pytest.approx(spine[path], rel=1e-4)


@given(TEXTS, st.integers(0, 2**16))
def test_one_source_alone_is_its_own_draft(texts, seed):
    d, texts = DRAFTERS["goose"], [list(range(len(text)))[:10] for text in texts]
    lone = kit.context(texts)
    state = state_of(d, seed)
    got, table = proposer(d)(state, lone), proposer(TABLE)(state.states[0], lone)
    for row in range(2):
        assert set(dict(kit.paths(table, row))) <= set(dict(kit.paths(got, row)))
    matched = kit.context([[1, 2, 1, 2], [0, 1, 1, 1]])
    state = state_of(d, seed, known=False)
    got, spine = proposer(d)(state, matched), proposer(MATCH)(state.states[1], matched)
    for row in range(2):
        assert check(got, row, kit.SIZE) == pytest.approx(check(spine, row, kit.SIZE), rel=1e-4)


def test_a_sure_match_takes_the_budget_and_an_unsure_one_leaves_it():
    """A period of two, seen often, is a deep spine; one token that came before is a short one with wide branches."""
    d = DRAFTERS["goose"]
    state = state_of(d, 0)
    deep = check(proposer(d)(state, kit.context([[1, 2] * 8] * 2)), 0, kit.SIZE)
    flat = check(proposer(d)(state, kit.context([[3, 4, 5, 3]] * 2)), 0, kit.SIZE)
    assert max(map(len, deep)) > max(map(len, flat))
    assert sum(len(path) == 1 for path in flat) > sum(len(path) == 1 for path in deep)


@pytest.mark.parametrize("name", DRAFTERS)
def test_finished_rows_are_not_drafted_for(name):
    d = DRAFTERS[name]
    draft = proposer(d)(state_of(d, 0), kit.context([[1, 1, 1]] * 2, active=[True, False]))
    assert draft.tree.valid.sum(-1).tolist()[1] == 1 < draft.tree.valid.sum(-1).tolist()[0]
    assert isinstance(d, Drafter) and d.vocab_size == kit.WORDS and d.depth == 9


def test_the_parts_keep_their_own_state():
    d = DRAFTERS["goose"]
    one, two = (d.init(None, batch, kit.SIZE) for batch in (1, 2))
    c = kit.context([[1, 2, 3, 4]] * 2, prompt_length=2)
    _, two = jax.jit(lambda state: d.propose(None, state, c))(two)
    two = jax.jit(d.release)(two, jnp.array([0]), c.tokens[:1], c.length[:1])
    assert np.asarray(two.states[1].store)[:3].tolist() == [3, 4, -1]
    table, match = d.insert(two, jnp.array([1]), one).states
    assert match.begin[1] == one.states[1].begin[0] and (table.successors == -1).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Goose(TABLE, MATCH, 1), "nodes: got 1"),
        (lambda: Grafted(TABLE, MATCH, 12, 13), "keep: got 13, takes an integer of 1 .. nodes, which is 12"),
        (lambda: Grafted(TABLE, MATCH, 12, 0), "keep: got 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
