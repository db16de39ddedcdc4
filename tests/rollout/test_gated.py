"""A drafter that is left out and taken up again: it knows all text by then, and a round without it is a plain one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import configs
from spec_jax.control.cost import CostModel
from spec_jax.control.throughput import Throughput
from spec_jax.drafters.drafter import Committed
from spec_jax.drafters.eagle import head as eagle
from spec_jax.drafters.none import NoDrafter
from spec_jax.drafters.small_model import SmallModel
from spec_jax.engine import loop, rows
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.requests import request, stack
from spec_jax.models.target import Output
from spec_jax.rollout import gated, run
from spec_jax.rollout.engine import RolloutEngine
from spec_jax.rollout.toggle import Toggle
from spec_jax.sampling.constraint import free
from spec_jax.sampling.settings import Sampling
from spec_jax.topology.growth import Growth
from spec_jax.tree import Draft, Tree, alone
from tests.drafters.eagle import kit as heads
from tests.faults.kit import FAST_COMPILE
from tests.rollout import kit

K = 3
MODEL = SmallModel(kit.TARGET, K)
ENGINE = kit.engine(gated.Gated(MODEL, chunk=4), widths=(1, K + 1))
ENGINE = dataclasses.replace(ENGINE, controller=gated.IfDrafted(ENGINE.controller))
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 1]]


def params(on):
    gate = gated.Gate(jnp.int32(len(PROMPTS) if on else -1), kit.policy())
    return EngineParams(kit.policy(), gate, free(kit.WORDS), jnp.array([1.0, 1.01]))


def decoder():
    return jax.jit(functools.partial(loop.decode, ENGINE), compiler_options=FAST_COMPILE)


def play(decode, plan, told=True):
    """Each segment's tokens per row and round, of rounds that are on or off; and the text."""
    sampling = Sampling(temperature=1.0)
    requests = stack([request(ENGINE, p, 32, i, sampling) for i, p in enumerate(PROMPTS)])
    state = jax.jit(functools.partial(rows.init, ENGINE), compiler_options=FAST_COMPILE)(params(told), requests)
    assert state.drafter.known.tolist() == [len(p) - 1 if told else 0 for p in PROMPTS]
    gained = []
    for on, count in plan:
        before = state.rows.counters
        state = decode(params(on), state, count)
        c = state.rows.counters
        gained.append((c.emitted - before.emitted).tolist() + (c.scored - before.scored).tolist())
    return gained, np.asarray(state.rows.tokens)


PLAN = [(True, 1), (False, 9), (True, 2), (False, 1), (True, 1)]


@pytest.fixture(scope="module")
def decode():
    return decoder()


def test_it_takes_up_where_the_text_is(decode):
    """The target drafts for itself, so that every draft is accepted, unless it missed a token of those while off."""
    gained, text = play(decode, PLAN)
    assert gained[0] == [K + 1, K + 1, K + 1, K + 1] and gained[1] == [9, 9, 9, 9]
    assert gained[2][:2] == [2 * (K + 1)] * 2 and gained[3] == [1, 1, 1, 1] and gained[4][:2] == [K + 1] * 2
    plain = play(decode, [(False, 26)])[1]
    length = [len(p) + 26 for p in PROMPTS]
    for row, n in enumerate(length):
        np.testing.assert_array_equal(text[row, : n - 1], plain[row, : n - 1])


def test_a_drafter_that_missed_text_is_caught(decode, monkeypatch):
    monkeypatch.setattr(gated.Gated, "_caught_up", lambda self, params, state, context: (state.inner, state.known))
    gained, text = play(decoder(), PLAN)
    assert gained[2][:2] != [2 * (K + 1)] * 2
    np.testing.assert_array_equal(text[0, :20], play(decode, PLAN)[1][0, :20])


@functools.cache
def head():
    """An EAGLE head, its parameters, and what a text of ten tokens has of the target."""
    drafter = eagle.drafter(heads.CONFIGS["eagle3"], Growth(nodes=3, depth=2, width=1, children=1, candidates=2))
    rng, taps = np.random.default_rng(0), len(heads.CONFIGS["eagle3"].taps)
    found = jnp.asarray(rng.normal(size=(2, 10, taps, heads.H)), jnp.float32)
    return drafter, heads.params(heads.CONFIGS["eagle3"]), found, jnp.asarray(rng.integers(0, heads.V, (2, 11)))


def chunk(start, count, taps, tree=None, width=3):
    """Tokens from `start` on as committed: `count` of them, in a block of fixed width."""
    tokens, at = head()[3], jnp.minimum(start + jnp.arange(width), 10)
    path = jnp.broadcast_to(jnp.arange(width) if tree is None else jnp.zeros(width, jnp.int32), (2, width))
    start, length = (jnp.full(2, n, jnp.int32) for n in (start, count))
    return Committed(tokens[:, at], start, length, tokens[:, start[0] + count], path, taps, tree)


def test_a_drafter_that_reads_features_hears_of_rounds_without_it():
    """Seven tokens one at a time in rounds where it is off are read as those of a prompt are; if not, it shows."""
    drafter, weights, found, tokens = head()
    gate, outer = gated.Gate(jnp.int32(0), weights), gated.Gated(drafter, reads=True)
    observe = {name: jax.jit(getattr(outer, name), compiler_options=FAST_COMPILE) for name in ("observe", "missed")}
    cut = lambda start: jnp.take(found, jnp.minimum(start + jnp.arange(3), 9), axis=1)  # noqa: E731
    begun = outer.init(gate, 2, 16)
    whole = part = observe["observe"](gate, begun, chunk(0, 3, cut(0)))
    for start in (3, 6):
        whole = observe["observe"](gate, whole, chunk(start, 3, cut(start)))
    whole = observe["observe"](gate, whole, chunk(9, 1, cut(9)))
    off, shape = dataclasses.replace(part, on=jnp.bool_(False)), jnp.zeros((2, 3), jnp.int32)
    silent = off
    for start in range(3, 10):
        tree = Tree(shape.at[:, 0].set(tokens[:, start]), shape - 1, shape == 0)
        taps = outer.tap(Output(jnp.zeros((2, 3, 1)), jnp.repeat(found[:, start : start + 1], 3, 1)))
        committed = chunk(start, 1, taps, tree)
        one, other = (observe[name](gate, off, committed) for name in ("observe", "missed"))
        jax.tree.map(np.testing.assert_array_equal, one, other)
        off = one
    assert off.known.tolist() == whole.known.tolist() == [10, 10] and silent.known.tolist() == [3, 3]
    np.testing.assert_allclose(off.inner.context, whole.inner.context, rtol=1e-4, atol=1e-5)
    assert abs(part.inner.context - whole.inner.context).max() > 0.1
    last = chunk(9, 1, cut(9))
    assert abs(observe["observe"](gate, part, last).inner.context - whole.inner.context).max() > 1e-2


def test_what_a_drafter_keeps_of_a_round():
    """A target without features has nothing for one that reads them; those of others are not kept."""
    drafter, _, found, _ = head()
    output = Output(jnp.zeros((2, 10, 1)), found)
    assert gated.Gated(NoDrafter()).tap(output) is None
    kept = gated.Gated(drafter, reads=True).tap(output)
    np.testing.assert_array_equal(kept.features, found)
    np.testing.assert_array_equal(kept.own, drafter.tap(output))
    with pytest.raises(ValueError, match="target: got one without taps"):
        gated.Gated(NoDrafter(), reads=True).tap(Output(output.logits))


def test_a_reader_that_is_not_said_to_be_one_is_refused():
    """It would be told of the rounds without it by their tokens alone."""
    drafter, weights, _, _ = head()
    target, params = heads.llama()
    engine = Engine(eagle.tapped(heads.CONFIGS["eagle3"], target), 24, drafter=gated.Gated(drafter))
    own = EngineParams(params, gated.Gate(jnp.int32(2), weights), free(heads.V), jnp.ones(1))
    with pytest.raises(ValueError, match="features that the drafter reads"):
        jax.eval_shape(lambda p: loop.decode(engine, p, rows.empty(engine, p, 2), 1), own)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["token_recycling", "stand", "lookahead"])
def test_a_drafter_that_learns_from_logits(name):
    """It is left out and taken up; rounds that it misses teach it nothing, and text is plain decoding's."""
    engine = configs.build(name, kit.TARGET, kit.MAX_LEN)
    engine = dataclasses.replace(engine, controller=Throughput(), widths=(1, engine.drafter.nodes), prefill_chunk=8)
    costs = kit.costs((12,), nodes=engine.drafter.nodes)
    rollouts = RolloutEngine(
        engine, kit.policy(), sizes=(12,), eos=(0,), costs=costs, toggle=Toggle(probe=2, every=3, loss=0.5)
    )
    segments = []
    for key in range(2):
        found, want = (e.generate(kit.PROMPTS, 24, group=kit.GROUP, key=key) for e in (rollouts, kit.plain()))
        np.testing.assert_array_equal(found.tokens[found.mask], want.tokens[want.mask])
        segments += found.segments
    assert {s.drafting for s in segments} == {True, False}


@pytest.mark.slow
def test_a_drafter_made_of_every_policy():
    """The policy itself drafts: all is accepted under every policy that it was derived from, less under another one."""
    engine = kit.engine(MODEL, widths=(1, K + 1))
    costs = kit.costs((4,), drafted=1.0, nodes=K + 1)
    derived = RolloutEngine(engine, kit.policy(), sizes=(4,), derive=lambda p: p, toggle=Toggle(), costs=costs)
    stale = RolloutEngine(engine, kit.policy(), kit.policy(), sizes=(4,), toggle=Toggle(), costs=costs)
    found = []
    for seed in (0, 1):
        texts = []
        for e in (derived, stale):
            e.update_params(kit.policy(seed))
            rollout = e.generate(kit.PROMPTS, 24, key=seed)
            found.append(rollout.acceptance_length)
            texts.append(rollout.tokens)
        np.testing.assert_array_equal(*texts)
    assert found[0] == found[1] == found[2] == K + 1 > 1.5 * found[3]


def test_a_round_without_a_draft_has_the_cheapest_width():
    """So a cost vector still says which, as `measure_cost` needs it."""
    shapes = Tree(jnp.zeros((2, 4), jnp.int32), jnp.zeros((2, 4), jnp.int32), jnp.zeros((2, 4), bool))
    draft = alone(Draft(shapes, jnp.zeros((2, 4))), jnp.ones(2, jnp.int32))
    controller, active = gated.IfDrafted(Throughput()), jnp.ones(2, bool)
    for cost, want in (([1.0, 1.0, 1.0], 0), ([1.0, 2.0, 3.0], 0), ([9.0, 9.0, 1.0], 2), ([9.0, 1.0, 9.0], 1)):
        found = controller.decide(controller.init(2), draft, active, jnp.array(cost), (1, 2, 4))
        assert int(found) == want


def test_prompts_are_measured_at_every_width_with_or_without_a_match(monkeypatch):
    """One token has no match in itself, and a round without a draft would measure one node at every width."""
    found = {}

    def measured(engine, params, state, decode):
        for i, width in enumerate(engine.widths):
            cost = jnp.full(len(engine.widths), 9.0).at[i].set(1.0)
            before = jax.tree.map(jnp.copy, state)
            after = decode(dataclasses.replace(params, cost=cost), jax.tree.map(jnp.copy, state), 2)
            c, old = after.rows.counters, before.rows.counters
            found[width] = int((c.scored - old.scored).sum()) / int((c.rounds - old.rounds).sum())
        return CostModel(engine.widths, tuple(map(float, engine.widths)))

    monkeypatch.setattr(run, "measure_cost", measured)
    kit.drafting((2,), toggle=Toggle(), costs=None).warm_up([7], kit.BUDGET)
    assert found == {width: float(width) for width in (1, kit.DRAFTER.nodes)}


def test_prompts_prefilled_while_it_is_off_are_told_before_it_drafts(decode):
    """As above, from rows whose drafter heard nothing: prompts are caught up with like text."""
    whole, text = play(decode, PLAN)
    assert play(decode, PLAN, told=False)[0] == whole
    np.testing.assert_array_equal(play(decode, PLAN, told=False)[1], text)
