"""Block drafters in the engine: plain text, a state that follows verdicts, a right network accepted to the full."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.audit.law import check_law
from spec_jax.drafters.block import network
from spec_jax.drafters.block.drafter import BlockDrafter, chain
from spec_jax.drafters.block.ends import ends_of
from spec_jax.drafters.block.expander import teacher_logits
from spec_jax.drafters.block.heads.head import Causal
from spec_jax.drafters.block.heads.markov import Markov
from spec_jax.drafters.block.shape import BestFirst, FanOut
from spec_jax.drafters.block.text import text_blocks
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.round import context_of
from spec_jax.sampling.constraint import free
from spec_jax.sampling.settings import Sampling
from spec_jax.topology.branching import Branching
from spec_jax.topology.coupling import Learner
from spec_jax.topology.growth import Growth
from spec_jax.verify.rejection import rejection
from tests.drafters.block import kit
from tests.drafters.hybrid import hybrid

LEN = 26
SHAPES = {
    "chain": (chain(kit.config(), ranking="point"), "plain"),
    "coupled tree": (BestFirst(nodes=8, depth=4, children=4, ranking="coupled"), "plain"),
    "grown": (Growth(nodes=8, depth=3, width=3, children=3, ranking="coupled"), "vanilla"),
}


def engine_of(drafter, **changes):
    return Engine(drafter.tapped(kit.llama()[0]), LEN, drafter=drafter, prefill_chunk=8, **changes)


def case(name):
    shape, head = SHAPES[name]
    c, head = kit.config(), kit.HEADS[head]
    return engine_of(BlockDrafter(c, shape, head, block=8)), kit.params(c, head)


@functools.cache
def plain():
    return np.asarray(kit.decoded(Engine(kit.llama()[0], LEN, prefill_chunk=8)).tokens)


@functools.cache
def fresh():
    """Features, keys and values of whole texts, as a jitted function of tokens and lengths."""
    c, own = kit.config(), kit.params(kit.config())
    target = dataclasses.replace(kit.llama()[0], taps=c.taps)
    params, slots = kit.llama()[1], LEN + 8

    def run(tokens, length):
        features, _ = target.prefill(params, target.init_state(params, tokens.shape[0], slots), tokens, length)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return features, network.context_rows(c, own.network, features, positions, slots)

    return kit.jit(run)


@pytest.mark.parametrize("name", SHAPES)
def test_text_is_plain_decodings_and_the_context_is_a_fresh_runs_after_every_verdict(name):
    engine, own = case(name)
    params, state = kit.start(engine, own)
    seen, before = set(), np.zeros(state.rows.length.shape, int)
    while state.rows.running.any():
        context, rows = state.drafter.context, state.rows
        features, (k, v) = fresh()(rows.tokens, jnp.maximum(rows.length - 1, 0))
        for row in np.flatnonzero(np.asarray(rows.running)):
            n = int(rows.length[row]) - 1
            assert int(context.length[row]) == n
            for got, want in ((context.k, k), (context.v, v)):
                for a, b in zip(got, want, strict=True):
                    np.testing.assert_allclose(a[row, :, :n], b[row, :n].swapaxes(0, 1), atol=1e-4)
            if n:
                np.testing.assert_allclose(state.drafter.feature[row], features[row, n - 1], atol=1e-4)
        state = kit.go_on(engine, params, state, 1)
        accepted = np.asarray(state.rows.counters.accepted)
        seen |= set((accepted - before).tolist())
        before = accepted
    np.testing.assert_array_equal(state.rows.tokens, plain())
    assert {0, 1} <= seen
    assert name == "chain" or np.abs(np.asarray(state.drafter.fit.h)).max() > 0


def test_text_over_a_recurrent_hybrid_is_plain_decodings():
    target, params = hybrid(sparse=False)
    c = kit.config(vocab_size=16, mask_token=15, taps=(0, 2))
    head = kit.HEADS["ancestor"]
    drafter = BlockDrafter(c, Growth(nodes=8, depth=4, width=2, children=3, ranking="coupled"), head, block=8)
    own = dataclasses.replace(kit.params(c, head), ends=ends_of(params))
    engine = Engine(drafter.tapped(target), LEN, drafter=drafter, prefill_chunk=8)
    assert engine.target.taps == (0, 2, 2)
    rows = kit.decoded(engine, own, params)
    want = kit.decoded(Engine(target, LEN, prefill_chunk=8), None, params)
    np.testing.assert_array_equal(rows.tokens, want.tokens)
    assert int(rows.counters.accepted.sum()) > 0


def test_the_choices_of_a_right_head_are_all_accepted():
    """A target whose next token follows from its last one alone, and a head that is told so."""
    c = kit.config()
    target, params = kit.llama()
    zero = lambda linear: jax.tree.map(jnp.zeros_like, linear)  # noqa: E731
    silent = lambda layer: dataclasses.replace(layer, o=zero(layer.o), down=zero(layer.down))  # noqa: E731
    blind = dataclasses.replace(params, layers=tuple(silent(layer) for layer in params.layers))
    follow = target.logits(blind, blind.embedding.T[None])[0]

    @dataclasses.dataclass(frozen=True)
    class Told(Causal):
        def init(self, config, key):
            return None

        def prepare(self, params, block):
            return None

        def start(self, params, block):
            return ()

        def step(self, params, block, depth, state, token):
            return state, follow[token]

    shape = Growth(nodes=5, depth=4, width=1, children=1, ranking="coupled")
    engine = engine_of(BlockDrafter(c, shape, Told(), Learner(1.0, 1.0, pooling=1e8), block=8))
    counters = kit.decoded(engine, kit.params(c), blind).counters
    np.testing.assert_array_equal(counters.accepted, counters.drafted)
    assert (counters.accepted >= 16).all()


def test_drawn_chains_are_verified_by_rejection_with_the_heads_own_confidences():
    c, head = kit.config(slots="shifted"), kit.HEADS["vanilla"]
    shape = Branching((1,) * 5, replacement=True)
    engine, own = engine_of(BlockDrafter(c, shape, head, block=8), rule=rejection), kit.params(c, head)
    rows = kit.decoded(engine, own)
    assert (rows.length == LEN).all() and int(rows.counters.accepted.sum()) > 0
    np.testing.assert_array_equal(rows.tokens[:3], plain()[:3])


def test_the_law_of_drawn_mixtures_is_the_targets():
    c, head = kit.config(block_size=3, layer_types=("full_attention",), causal=(False,)), kit.HEADS["mixture"]
    shape = Branching((1, 1), replacement=True)
    drafter = BlockDrafter(c, shape, head, block=8)
    engine = Engine(drafter.tapped(kit.llama()[0]), 8, drafter=drafter, rule=rejection, prefill_chunk=8)
    params = EngineParams(kit.llama()[1], kit.params(c, head), free(kit.V), jnp.ones(1))
    settings = Sampling(temperature=0.7, top_p=0.95)
    report = check_law(engine, params, [1, 2], [0, 3, 4, 9], draws=8_000, batch=2_000, sampling=settings)
    assert report.passed and 0.05 < report.acceptance < 0.95


def test_serving_sees_what_training_sees():
    """D25: every round's logits, given the text that comes, are those of the training forward at its anchor."""
    c, head = kit.config(slots="shifted"), kit.HEADS["domino"]
    own = kit.params(c, head)
    engine = engine_of(BlockDrafter(c, Growth(nodes=6, depth=5, width=1, children=1), head, block=8))
    params, state = kit.start(engine, own)
    end = kit.go_on(engine, params, state, 2**30).rows
    target = engine.target

    @kit.jit
    def both(state):
        block = engine.drafter.run(own, state.drafter, context_of(state.rows, params.constraint))
        anchors = jnp.maximum(state.rows.length - 1, 0)[:, None]
        features, _ = target.prefill(
            params.target, target.init_state(params.target, 9, LEN + 8), end.tokens, end.length
        )
        at = jnp.minimum(anchors + jnp.arange(5), LEN - 1)
        serving = teacher_logits(head, own, block, jnp.take_along_axis(end.tokens, at, axis=1))
        late = text_blocks(c, own, jnp.roll(features, 1, axis=1), end.tokens, anchors, head)
        return serving, text_blocks(c, own, features, end.tokens, anchors, head), late

    while state.rows.running.any():
        serving, training, late = both(state)
        known = np.asarray(training.known[:, 0]) & np.asarray(state.rows.running)[:, None]
        assert known.any()
        np.testing.assert_allclose(serving[known], training.logits[:, 0][known], rtol=1e-4, atol=1e-3)
        assert np.abs(np.asarray(serving - late.logits[:, 0]))[known].max() > 0.1
        state = kit.go_on(engine, params, state, 1)


def test_a_chains_confidences_are_the_heads():
    c, head = kit.config(), Markov(rank=6)
    own = kit.params(c, head)
    engine = engine_of(BlockDrafter(c, chain(c, head), head, block=8))
    params, state = kit.start(engine, own)

    @kit.jit
    def proposed(state):
        view = context_of(state.rows, params.constraint)
        draft, _ = engine.drafter.propose(own, state.drafter, view)
        block = engine.drafter.run(own, state.drafter, view)
        return draft, head.confidence_logits(own, block, draft.tree.tokens[:, :-1])

    draft, logits = proposed(state)
    np.testing.assert_allclose(draft.confidence[:, 1:], jax.nn.sigmoid(logits), atol=1e-6)
    assert draft.proposal == "coupled" and (draft.confidence[:, 0] == 1).all()


def test_rows_that_come_and_go():
    engine, own = case("grown")
    drafter = engine.drafter
    _, state = kit.start(engine, own)
    old = state.drafter
    pick = lambda x: x[jnp.array([3, 4])]  # noqa: E731
    other = dataclasses.replace(
        drafter.init(own, 2, LEN), context=jax.tree.map(pick, old.context), feature=pick(old.feature)
    )
    moved = drafter.insert(drafter.init(own, 2, LEN), jnp.array([1, 5]), other)
    for a, b in zip(jax.tree.leaves(moved.context), jax.tree.leaves(old.context), strict=True):
        np.testing.assert_array_equal(a[1], b[3])
        assert (np.asarray(a[0]) == 0).all()
    gone = drafter.release(old, jnp.array([3, 99]), jnp.zeros((2, LEN), jnp.int32), jnp.ones(2, jnp.int32))
    assert gone.context.length[3] == 0 and (gone.context.length[4:] == old.context.length[4:]).all()


def test_fan_out_is_one_where_the_drafter_is_sure():
    log = jnp.log(jnp.array([[0.98, 0.01, 0.005, 0.005], [0.26, 0.25, 0.25, 0.24]]))
    kept = np.asarray(FanOut(slope=4.0, middle=1.0).keep(log) > -jnp.inf).sum(1)
    assert list(kept) == [1, 4]


def test_what_does_not_fit_is_refused():
    c, target = kit.config(), kit.llama()[0]
    shape = SHAPES["chain"][0]
    with pytest.raises(ValueError, match="shape is 'one of depth 5'"):
        BlockDrafter(c, BestFirst(nodes=8, depth=5))
    with pytest.raises(ValueError, match="shape is 'BestFirst with a head that reads the path'"):
        BlockDrafter(c, shape, kit.HEADS["domino"])
    with pytest.raises(ValueError, match="target is 'one of hidden_size 16'"):
        BlockDrafter(kit.config(hidden_size=32), shape).tapped(target)
    with pytest.raises(ValueError, match="target is 'one of 3 layers'"):
        BlockDrafter(kit.config(taps=(1, 4)), shape).tapped(target)
    own = kit.params(c)
    with pytest.raises(ValueError, match="target: got one without taps"):
        kit.start(Engine(target, LEN, drafter=BlockDrafter(c, shape)), own)
    narrow = BlockDrafter(c, shape, block=4)
    with pytest.raises(ValueError, match="block: got 4, takes at least the engine's prefill_chunk, 8"):
        kit.start(engine_of(narrow), own)
    one = dataclasses.replace(target, taps=(1,))
    with pytest.raises(ValueError, match="target: got one with taps of 1 of size 16, takes 2"):
        kit.start(Engine(one, LEN, drafter=BlockDrafter(c, shape)), own)
