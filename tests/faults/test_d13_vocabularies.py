"""D13: a drafter of another vocabulary. The guard names it; forced, the text is the target's, whatever the ids mean."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import models

from spec_jax.audit.law import check_law
from spec_jax.drafters.small_model import SmallModel
from spec_jax.engine import round as rounds
from spec_jax.engine import rows
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.requests import request
from spec_jax.models.shared_tokens import SharedTokens, require_same_ids, shared_ids
from spec_jax.models.tokenizer import Tokenizer
from spec_jax.models.toy import TableTarget
from spec_jax.sampling.constraint import free
from spec_jax.verify.rejection import rejection
from tests.faults import kit
from tests.faults.drafters import Guess, TableDrafter
from tests.faults.oracle import generate

V, WIDE = 8, 10
WORDS = "abcdefgh"
# The drafter's id of each of the target's tokens: it has 6 of them, it has all and more, or its ids mean other tokens.
IDS = {
    "6 tokens": [0, 1, 2, -1, 4, 5, -1, 3],
    "10 tokens": [0, 9, 2, 8, 4, 7, 6, 1],
    "permuted": [3, 0, 1, 2, 7, 4, 5, 6],
}


def tokenizer(words):
    return Tokenizer(tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [])))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("abdcefgh", "draft: got token ids of another meaning, id 2 is 'd', takes the target's, where it is 'c'"),
        ("abcdef", "id 6 is no token, takes the target's, where it is 'g'"),
        ("abcdefghij", "id 8 is 'i', takes the target's, where it is no token"),
    ],
)
def test_ids_of_another_meaning_are_named(words, message):
    require_same_ids(tokenizer(WORDS), tokenizer(WORDS))
    with pytest.raises(ValueError, match=message):
        require_same_ids(tokenizer(WORDS), tokenizer(words))


@pytest.mark.parametrize("size", [6, 10])
def test_an_engine_takes_no_drafter_of_another_size(size):
    with pytest.raises(ValueError, match=f"drafter: got one for {size} token ids, takes one for the target's 8"):
        Engine(TableTarget(V), 16, drafter=SmallModel(TableTarget(size), 2))


def test_shared_ids_are_those_of_equally_spelled_tokens():
    found = shared_ids(tokenizer(WORDS), tokenizer("hxabzg"), 10)
    assert found.tolist() == [2, 3, -1, -1, -1, -1, 5, 0, -1, -1]
    view = SharedTokens(TableTarget(6), 10)
    np.testing.assert_array_equal(view.params(None, found).ids, found)
    for wrong in (found[:9], np.full(10, -1), found + 1, np.where(found < 0, -2, found)):
        with pytest.raises(ValueError, match="ids: got"):
            view.params(None, wrong)
    with pytest.raises(ValueError, match="unknown: got 6, takes one of the model's, 0 .. 5"):
        SharedTokens(TableTarget(6), 10, unknown=6)


def forced(name, mode):
    rng = np.random.default_rng(13)
    target, draft = (jnp.asarray(rng.normal(0, 1.2, (n, n)), jnp.float32) for n in (V, WIDE))
    view = SharedTokens(TableTarget(WIDE), V)
    engine = Engine(TableTarget(V), 16, drafter=SmallModel(view, 2, mode), rule=rejection, prefill_chunk=4)
    own = view.params(draft, np.array(IDS[name]))
    return engine, EngineParams(target, own, free(V), jnp.ones(1))


@pytest.mark.parametrize("name", IDS)
def test_forced_drafts_keep_the_targets_law(name):
    report = check_law(*forced(name, "sampled"), [1, 2], [0, 3, 4, 5, 7], draws=100_000, batch=4000)
    assert report.passed and report.acceptance > 0.05


@dataclasses.dataclass(frozen=True)
class Strict(kit.RowTables):
    """An embedding that can't be asked for a row outside it: all of the row's logits are NaN."""

    def score(self, params, state, tree, staged=None, nodes=None):
        output, staged, state = super().score(params, state, tree, staged, nodes)
        inside = ((tree.tokens >= 0) & (tree.tokens < V)).all(1)[:, None, None]
        return dataclasses.replace(output, logits=jnp.where(inside, output.logits, jnp.nan)), staged, state


@functools.cache
def wild():
    """An engine whose drafter proposes trees of ids 0 .. 9, and greedy requests."""
    table = jnp.asarray(np.random.default_rng(0).normal(0, 1.5, (WIDE, WIDE)), jnp.float32)
    guess = Guess(table, table, jnp.int32(kit.K), jnp.int32(0), jnp.int32(0))
    e = dataclasses.replace(kit.engine(TableDrafter(kit.TREE, "point"), log_probs=False), target=Strict())
    asked = [request(e, [1, 2 + i], 20) for i in range(6)]
    return e, kit.engine_params(e, kit.row_tables(13, 6), guess), kit.batch(asked, 6)


def served():
    engine, params, requests = wild()
    run = kit.jit(lambda p, r: kit.decode_from(engine, p, r, kit.ALL))  # anew each time, as `rounds` is now
    return jax.device_get(run(params, requests))


def test_ids_outside_the_vocabulary_never_reach_the_target(monkeypatch):
    state, tables = served(), wild()[1].target
    want = [generate(kit.logits_of(tables[row]), [1, 2 + row], 20) for row in range(6)]
    assert all(kit.same_text(state, row, want[row]) for row in range(6))
    c = state.rows.counters
    assert c.accepted.sum() > 0 and c.drafted.sum() < c.rounds.sum() * (len(kit.TREE) - 1)  # some were dropped
    monkeypatch.setattr(rounds, "usable", lambda draft, *_: draft)
    state = served()
    assert not all(kit.same_text(state, row, want[row]) for row in range(6))


def test_what_hangs_below_an_unknown_id_is_dropped_too():
    engine, params, requests = wild()
    state = kit.jit(functools.partial(rows.init, engine))(params, requests)
    context = rounds.context_of(state.rows, params.constraint)
    draft, _ = engine.drafter.propose(params.drafter, state.drafter, context)
    tokens = np.asarray(draft.tree.tokens).copy()
    tokens[:, 1], tokens[0, 2] = V, -1
    draft = dataclasses.replace(draft, tree=dataclasses.replace(draft.tree, tokens=jnp.asarray(tokens)))
    got = rounds.usable(draft, context, V).tree
    below = {1: (1, 3, 4, 6, 7), 2: (2, 5)}  # by kit.TREE
    assert not np.asarray(got.valid)[:, below[1]].any() and not np.asarray(got.valid)[0, below[2]].any()
    assert (np.asarray(got.tokens) >= 0).all() and (np.asarray(got.tokens) < V).all()
