"""A drafter and retrieval as one tree: whose node is whose, what each source is told, and the engine's text."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_jax.drafters.block.drafter import BlockDrafter
from spec_jax.drafters.block.shape import BestFirst
from spec_jax.drafters.combined import Combined, CombinedState
from spec_jax.drafters.depth_tree import Choices
from spec_jax.drafters.drafter import Committed, Drafter, Stateless
from spec_jax.drafters.growing import on_path
from spec_jax.drafters.model_tree import ModelTree
from spec_jax.drafters.ngram import NGram
from spec_jax.drafters.small_model import SmallModel
from spec_jax.drafters.suffix import Suffix
from spec_jax.engine.engine import Engine
from spec_jax.models.toy import AuditTarget
from spec_jax.topology.branching import Branching
from spec_jax.topology.growth import Growth
from spec_jax.topology.static import likeliest
from spec_jax.tree import Tree
from tests.drafters import kit
from tests.drafters.block import kit as toy
from tests.drafters.eagle import kit as heads

LOOKUP, MATCH = NGram(4, 3, 1), Suffix(9, 3, 6, 20, 1)
TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=kit.SIZE), min_size=2, max_size=2)


@functools.cache
def proposer(drafter):
    return jax.jit(lambda c: drafter.propose(None, drafter.init(None, 2, kit.SIZE), c))


def owned(drafter, c):
    """The draft, and whose node is whose."""
    draft, state = jax.device_get(proposer(drafter)(c))
    return draft, state.own


@given(TEXTS, st.sampled_from([2, 24]), st.booleans())
def test_a_joined_draft_is_a_tree_of_both_and_knows_whose_nodes_are_whose(texts, room, keep):
    d, c = Combined(LOOKUP, MATCH, 7, keep), kit.context(texts, room=room)
    draft, own = owned(d, c)
    first, second = (proposer(source)(c)[0] for source in d.members)
    assert draft.proposal == "point" and draft.tree.tokens.shape == (2, 7)
    for row in range(2):
        known, theirs = kit.paths(draft, row), [path for path, _ in kit.paths(first, row)]
        names = [path for path, _ in known]
        assert set(names) <= {*theirs, *(path for path, _ in kit.paths(second, row))}
        assert len(set(names)) == len(names) and all(len(path) < room for path in names)
        assert not keep or set(theirs) <= set(names)
        assert own[row, 0] == 0
        for path, mine in zip(names, own[row, 1:], strict=False):
            assert mine == (len(path) if path in theirs else -1), "the lookup's draft is a chain"


@given(TEXTS, st.sampled_from([0.53, 1.9]))
def test_the_drafter_is_left_out_where_retrieval_found_enough_in_every_row(texts, enough):
    c = kit.context(texts)
    draft, own = owned(Combined(LOOKUP, MATCH, 7, False, enough), c)
    always, whose = owned(Combined(LOOKUP, MATCH, 7), c)
    found = jax.device_get(proposer(MATCH)(c)[0])
    if all(sum(kit.chances(found, row)) >= enough for row in range(2)):
        assert (own[:, 0] == 0).all() and (own[:, 1:] == -1).all()
        for row in range(2):
            paths = lambda draft, row=row: {path for path, _ in kit.paths(draft, row)}  # noqa: E731
            assert paths(draft) <= paths(found)
    else:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), (draft, own), (always, whose))


@dataclasses.dataclass(frozen=True)
class Listener(Stateless):
    """Drafts as another does, taps the logits, and keeps what it was told last."""

    drafter: Drafter

    @property
    def nodes(self):
        return self.drafter.nodes

    @property
    def depth(self):
        return self.drafter.depth

    def propose(self, params, state, context):
        return self.drafter.propose(params, state, context)[0], state

    def observe(self, params, state, committed):
        return committed


def test_each_source_is_told_of_its_own_taps_and_nodes():
    d = Combined(Listener(LOOKUP), MATCH, 7)
    whole = lambda *x: jnp.asarray([x], jnp.int32)  # noqa: E731
    told = Committed(whole(1, 2, 3, 4, 5), *whole(9, 5, 3)[0][:, None], whole(*range(5)), "prefill")
    state = CombinedState(((), MATCH.init(None, 1, 8)), whole(0, 2, -1, 1, -1, -1, -1))
    first = d.observe(None, state, told).states[0]
    assert first.taps == "prefill" and first.own is None
    tree = Tree(whole(*range(7)), whole(-1, *range(6)), jnp.ones((1, 7), bool))
    told = dataclasses.replace(told, taps=("mine", "its"), tree=tree, path=whole(0, 3, 1, 2, 9))
    first = d.observe(None, state, told).states[0]
    assert first.taps == "mine" and first.own.tolist() == [[0, 1, 2, -1, -1]]
    assert on_path(whole(7, 8, 9), first).tolist() == [[7, 8, 9, -1, -1]]
    assert on_path(whole(7, 8, 9), dataclasses.replace(first, own=None)).tolist() == [[7, -1, 8, 9, -1]]


def combined(name, keep=False, enough=None):
    """(engine, drafter parameters) of a toy drafter with retrieval."""
    if name == "dflash":
        config = toy.config(block_size=4, taps=(0, 1), layer_types=("full_attention",), causal=(False,))
        drafter = BlockDrafter(config, BestFirst(6, 3, children=3, ranking="coupled"))
        target, own = drafter.tapped(toy.llama(1)[0]), toy.params(config)
    else:
        config, shape = heads.CONFIGS[name], Choices(likeliest((0.6, 0.2), 6, 3), ranking="coupled")
        drafter, own = heads.drafter(config, shape), heads.params(config)
        target = heads.tapped(config, toy.llama(1)[0])
    return Engine(target, 20, drafter=Combined(drafter, Suffix(6, 2, 4, 0, 0), 8, keep, enough), prefill_chunk=8), own


@functools.cache
def plain():
    return np.asarray(toy.decoded(Engine(toy.llama(1)[0], 20, prefill_chunk=8), None, toy.llama(1)[1]).tokens)


@pytest.mark.parametrize(
    ("name", "keep", "enough"), [("dflash", False, None), ("dflash", False, 0.5), ("medusa", True, None)]
)
def test_text_is_plain_decodings_and_the_drafter_learns(name, keep, enough):
    engine, own = combined(name, keep, enough)
    params, start = toy.start(engine, own, toy.llama(1)[1])
    after = toy.go_on(engine, params, start, 2**30)
    np.testing.assert_array_equal(after.rows.tokens, plain())
    assert int(after.rows.counters.accepted.sum()) > 0
    before, learned = start.drafter.states[0].fit, after.drafter.states[0].fit
    assert any(not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (before, learned)), strict=True))


def test_rows_are_replaced_and_emptied_in_both_sources():
    d = Combined(Suffix(4, 1, 3, 8, 1), MATCH, 7)
    one, two = (d.init(None, batch, kit.SIZE) for batch in (1, 2))
    c = kit.context([[1, 2, 3, 4]] * 2, prompt_length=2)
    _, two = jax.jit(lambda state: d.propose(None, state, c))(two)
    two = d.insert(jax.jit(d.release)(two, jnp.array([0]), c.tokens[:1], c.length[:1]), jnp.array([1]), one)
    assert [np.asarray(state.store)[:3].tolist() for state in two.states] == [[3, 4, -1]] * 2
    assert all(state.begin[1] == fresh.begin[0] for state, fresh in zip(two.states, one.states, strict=True))


AUDIT = AuditTarget(8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Combined(LOOKUP, MATCH, 1), "nodes: got 1, takes an integer of at least 2"),
        (lambda: Combined(MATCH, LOOKUP, 7, True), "nodes: got 7, takes at least the drafter's 9"),
        (lambda: Combined(LOOKUP, enough=0.0), "enough: got 0.0, takes a positive number of tokens or None"),
        (lambda: Combined(ModelTree(AUDIT, Growth(4, 3, 1, 1))), "drafter: got a ModelTree"),
        (lambda: Combined(LOOKUP, SmallModel(AUDIT, 4)), "retrieval: got a SmallModel"),
    ],
)
def test_sources_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_drawn_drafts_are_refused():
    engine, own = combined("dflash")
    drawn = dataclasses.replace(engine.drafter.drafter, shape=Branching((1, 1), replacement=True))
    engine = dataclasses.replace(engine, drafter=Combined(drawn, LOOKUP, 8), widths=())
    params, start = toy.start(engine, own, toy.llama(1)[1])
    with pytest.raises(ValueError, match="drafter: got one whose drafts are sampled, takes point or coupled ones"):
        jax.eval_shape(functools.partial(toy.loop.decode, engine), params, start, 1)
