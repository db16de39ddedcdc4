"""A drafter that is left out and taken up again: it knows all text by then, and a round without it is a plain one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.control.cost import CostModel
from spec_jax.control.throughput import Throughput
from spec_jax.drafters.none import NoDrafter
from spec_jax.drafters.small_model import SmallModel
from spec_jax.engine import loop, rows
from spec_jax.engine.engine import EngineParams
from spec_jax.engine.requests import request, stack
from spec_jax.models.target import Output
from spec_jax.rollout import gated, run
from spec_jax.rollout.engine import RolloutEngine
from spec_jax.rollout.toggle import Toggle
from spec_jax.sampling.constraint import free
from spec_jax.sampling.settings import Sampling
from spec_jax.tree import Draft, Tree, alone
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


class Reader(NoDrafter):
    def tap(self, output):
        return output.logits


def test_a_drafter_that_reads_the_target_is_refused():
    with pytest.raises(ValueError, match="Reader"):
        gated.Gated(Reader()).tap(Output(jnp.zeros((1, 1, 2))))
    assert gated.Gated(NoDrafter()).tap(Output(jnp.zeros((1, 1, 2)))) is None


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
