"""Several drafters, one of which drafts: the text is plain decoding's, each is told what the others did, and scored."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_jax.control.bandit import Exp3, Hedge, Ucb
from spec_jax.drafters.chosen import Chosen, ChosenState
from spec_jax.drafters.combined import Combined
from spec_jax.drafters.drafter import Committed
from spec_jax.drafters.lookahead import Lookahead
from spec_jax.drafters.model_tree import ModelTree
from spec_jax.drafters.ngram import NGram
from spec_jax.drafters.recycling import Recycling
from spec_jax.drafters.small_model import SmallModel
from spec_jax.drafters.suffix import Suffix
from spec_jax.engine.decoder import Decoder
from spec_jax.engine.engine import Engine
from spec_jax.models.toy import AuditTarget, audit_table
from spec_jax.rollout.gated import Gated
from spec_jax.sampling.settings import Sampling
from spec_jax.topology.coupling import Learner
from spec_jax.topology.growth import Growth
from spec_jax.tree import Tree
from tests.drafters.block import kit as toy
from tests.drafters.eagle import kit as heads

V, K = 8, 4
TARGET = AuditTarget(V)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [4], [5, 6], [7, 1]]
SETTINGS = (Sampling(), Sampling(temperature=0.9, presence_penalty=0.5, banned_tokens=(2,)))
LOOKUP, MATCH, TABLE, MODEL = NGram(K, 3, 1), Suffix(K + 1, 2, 4, 0, 0), Recycling(V, K + 1), SmallModel(TARGET, K)
ARMS = (LOOKUP, MODEL, MATCH, TABLE)
POLICIES = {"ucb": Ucb(), "exp3": Exp3(), "hedge": Hedge()}


@functools.cache
def tables():
    big = audit_table(V, seed=1)
    return big, 0.7 * big + audit_table(V, seed=2, scale=0.8)


@functools.cache
def decoder(name):
    big, small = tables()
    if name == "plain":
        return Decoder(Engine(TARGET, 48), big, batch=3)
    engine = Engine(TARGET, 48, drafter=Chosen(ARMS, POLICIES[name]))
    return Decoder(engine, big, (None, small, None, None), batch=3)


@functools.cache
def results(name):
    return [r for s in SETTINGS for r in decoder(name).generate(PROMPTS, 30, key=6, sampling=s)]


@pytest.mark.parametrize("name", POLICIES)
def test_text_is_plain_decodings(name):
    assert [r.tokens for r in results(name)] == [r.tokens for r in results("plain")]
    accepted, drafted = (sum(r.counters[c] for r in results(name)) for c in ("accepted", "drafted"))
    assert 0 < accepted < drafted


class Unaware(Chosen):
    """A planted fault: every drafter is told of each verdict as if the draft had been its own."""

    def observe(self, params, state, committed):
        if committed.tree is None:
            return super().observe(params, state, committed)
        told = [dataclasses.replace(committed, taps=taps) for taps in committed.taps]
        each = zip(self._with(params), state.states, told, strict=True)
        states = tuple(d.observe(p, s, c) for (d, p), s, c in each)
        return dataclasses.replace(super().observe(params, state, committed), states=states)


def followed(kind, policy):
    """(rounds, those after which the model's state was not that of the committed text, rounds it drafted in)."""
    big, small = tables()
    engine = Engine(TARGET, 48, drafter=kind((LOOKUP, MODEL), policy))
    d = Decoder(engine, big, (None, small), batch=2)
    for key, prompt in enumerate(([1, 2, 3, 1, 2, 3], [5, 6])):
        d.submit(prompt, 30, key=key, sampling=SETTINGS[1])
    rounds, wrong, mine = 0, 0, 0
    while d.busy:
        d.step(1)
        rows, state = d._state.rows, d._state.drafter
        rounds, mine = rounds + 1, mine + int(state.arm == 1)
        for row in np.flatnonzero(np.asarray(rows.running)):
            length, model = int(rows.length[row]) - 1, state.states[1].model
            want = TARGET.entry(rows.tokens[row, :length], jnp.arange(length))
            same = int(model.length[row]) == length
            wrong += not (same and (np.asarray(model.slots[row, :length]) == np.asarray(want)).all())
    return rounds, wrong, mine


@pytest.mark.parametrize("policy", (Ucb(), Hedge(2)))
def test_a_models_state_follows_every_verdict_whoever_drafted(policy):
    rounds, wrong, mine = followed(Chosen, policy)
    assert wrong == 0 and 0 < mine < rounds


def test_a_model_that_is_not_told_who_drafted_is_found_out():
    assert followed(Unaware, Ucb())[1] > 0


def test_the_drafter_that_is_always_right_is_preferred():
    big, _ = tables()
    arms = (LOOKUP, SmallModel(TARGET, K), MATCH)
    for policy, share in ((Ucb(0.3), 0.7), (Hedge(), 0.7)):
        d = Decoder(Engine(TARGET, 80, drafter=Chosen(arms, policy)), big, (None, big, None), batch=1)
        d.submit([4], 75, key=1, sampling=Sampling(temperature=1.0))
        chosen = []
        while d.busy:
            d.step(1)
            chosen.append(int(d._state.drafter.arm))
        assert np.mean([arm == 1 for arm in chosen[len(chosen) // 2 :]]) >= share


def begins_with(tree, row, emitted):
    """The longest root path of a row's draft that the emitted tokens begin with."""
    tokens, parent, valid = (np.asarray(x)[row] for x in (tree.tokens, tree.parent, tree.valid))
    paths = {0: ()}
    for i in range(1, len(tokens)):
        if valid[i] and int(parent[i]) in paths:
            paths[i] = (*paths[int(parent[i])], int(tokens[i]))
    return max(len(p) for p in paths.values() if tuple(emitted[: len(p)]) == p)


@given(st.integers(0, 2**16))
def test_every_draft_is_scored_by_what_was_emitted(seed):
    rng = np.random.default_rng(seed)
    b, n, m = 3, K + 1, K + 1
    trees = []
    for _ in range(2):
        parent = np.stack([[-1, *(int(rng.integers(0, i)) for i in range(1, n))] for _ in range(b)])
        valid = np.ones((b, n), bool)
        for row in range(b):
            for i in range(1, n):
                valid[row, i] = valid[row, parent[row, i]] and rng.random() < 0.8
        trees.append(Tree(*(jnp.asarray(x) for x in (rng.integers(0, 2, (b, n)), parent, valid))))
    length = rng.integers(0, m + 1, b)
    tokens, following = rng.integers(0, 2, (b, m)), rng.integers(0, 2, b)
    emitted = [[*tokens[r, 1 : length[r]], following[r]] if length[r] else [] for r in range(b)]
    whole = lambda x: jnp.asarray(x, jnp.int32)  # noqa: E731
    committed = Committed(*map(whole, (tokens, np.zeros(b), length, following, np.zeros((b, m)))), tree=trees[0])
    d = Chosen((LOOKUP, MATCH), Hedge())
    got = d.rewards(ChosenState((), (), jnp.int32(0), tuple(trees)), committed)
    moved = np.flatnonzero(length)
    want = [sum(begins_with(t, r, emitted[r]) for r in moved) / (max(len(moved), 1) * d.depth) for t in trees]
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_head_on_features_follows_every_verdict_and_learns_from_its_own_drafts_alone():
    """An EAGLE head beside lookup on a tiny Llama: its state is a fresh run's, whoever drafted."""
    config = heads.CONFIGS["eagle3"]
    shape = Growth(nodes=K + 1, depth=K, width=1, children=1, candidates=8, ranking="coupled")
    arms = (LOOKUP, heads.drafter(config, shape, Learner(decay=1.0)))
    engine = Engine(heads.tapped(config), 20, drafter=Chosen(arms, Ucb()), prefill_chunk=8)
    together, state = toy.start(engine, (None, heads.params(config)))
    learned, checked = ([], []), 0
    while np.asarray(state.rows.running).any():
        before = state.drafter.states[1].fit
        state = toy.go_on(engine, together, state, 1)
        head = state.drafter.states[1]
        learned[int(state.drafter.arm)].append(bool((head.fit.h != before.h).any()))
        if checked < 3 and np.asarray(state.rows.running).all():
            want = heads.fresh(engine, together, state).drafter.states[1]
            heads.same_as_fresh(want, head, state.rows.length - 1)
            checked += 1
    want = toy.decoded(Engine(toy.llama()[0], 20, prefill_chunk=8))
    np.testing.assert_array_equal(state.rows.tokens, want.tokens)
    assert checked > 1 and learned[0] and not any(learned[0]) and any(learned[1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Chosen((LOOKUP,), Ucb()), "takes a tuple of at least two"),
        (lambda: Chosen((LOOKUP, NGram(3)), Ucb()), r"drafters: got drafts of \[5, 4\] nodes, takes equal ones"),
        (lambda: Chosen((LOOKUP, Combined(LOOKUP, MATCH, K + 1)), Ucb()), "drafters: got a Combined"),
        (lambda: Chosen((NGram(3), Lookahead(1, 3, 1, 4)), Ucb()), "drafters: got a Lookahead"),
        (lambda: Chosen((LOOKUP, Gated(MODEL)), Ucb()), "drafters: got a Gated"),
        (lambda: Combined(Chosen((LOOKUP, MATCH), Ucb()), MATCH, K + 1), "drafter: got a Chosen"),
        (lambda: Combined(LOOKUP, Combined(LOOKUP, MATCH, K + 1), K + 1), "retrieval: got a Combined"),
        (lambda: Chosen((LOOKUP, ModelTree(TARGET, Growth(K + 1, K, 1, 1))), Ucb()), "drafters: got a ModelTree"),
        (lambda: Chosen((TABLE, SmallModel(AuditTarget(6), K)), Ucb()), "drafters: got ones for"),
        (lambda: Chosen((LOOKUP, MATCH), Ucb()).init((None,), 1, 8), "params: got tuple, takes a tuple of 2, or None"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_drawn_drafts_are_refused():
    big, small = tables()
    engine = Engine(TARGET, 48, drafter=Chosen((LOOKUP, SmallModel(TARGET, K, "sampled")), Ucb()))
    with pytest.raises(ValueError, match="drafters: got one whose drafts are sampled"):
        Decoder(engine, big, (None, small)).generate([[1]], 2)
