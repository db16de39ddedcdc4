"""A model that drafts speculatively: its draft is the chain that it would draft token by token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from spec_jax.drafters.cascade import Cascade
from spec_jax.drafters.ngram import NGram
from spec_jax.drafters.small_model import SmallModel
from spec_jax.engine.decoder import Decoder
from spec_jax.engine.engine import Engine
from spec_jax.models.toy import AuditTarget, audit_table
from spec_jax.sampling.settings import Sampling
from tests.drafters import kit

V, K = 8, 4
TARGET = AuditTarget(V)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [4], [5, 6]]
SETTINGS = (Sampling(), Sampling(temperature=0.9, presence_penalty=0.5, banned_tokens=(2,)))
MADE = {
    "alone": SmallModel(TARGET, K),
    "cascade": Cascade(TARGET, NGram(k=3, n_min=1), K),
    "tail": Cascade(TARGET, NGram(k=3, n_min=1), K, tail=True),
}


@functools.cache
def results(name):
    big = audit_table(V, seed=1)
    small = 0.7 * big + audit_table(V, seed=2, scale=0.8)
    engine = Engine(TARGET, 48, drafter=MADE[name]) if name in MADE else Engine(TARGET, 48)
    decoder = Decoder(engine, big, small if name in MADE else None, batch=3)
    return [r for s in SETTINGS for r in decoder.generate(PROMPTS, 30, key=6, sampling=s)]


def test_it_drafts_what_the_model_would_draft_alone():
    for ours, alone, plain in zip(results("cascade"), results("alone"), results("plain"), strict=True):
        assert ours.tokens == alone.tokens == plain.tokens
        for name in ("rounds", "drafted", "accepted"):
            assert ours.counters[name] == alone.counters[name]


def test_a_tail_goes_on_behind_the_models_tokens():
    count = lambda name, key: sum(r.counters[key] for r in results(name))  # noqa: E731
    assert [r.tokens for r in results("tail")] == [r.tokens for r in results("plain")]
    assert count("tail", "drafted") / count("tail", "rounds") > count("cascade", "drafted") / count("cascade", "rounds")
    assert count("tail", "accepted") / count("tail", "rounds") >= count("cascade", "accepted") / count(
        "cascade", "rounds"
    )


class Reader(NGram):
    """Notes what it is shown of the target's state."""

    shown = []

    def propose(self, params, state, context):
        self.shown.append(context.target)
        return super().propose(params, state, context)


def test_the_inner_drafter_is_not_shown_a_state_that_is_behind_its_text():
    d, small = Cascade(AuditTarget(kit.WORDS), Reader(k=3, n_min=1), K, tail=True), audit_table(kit.WORDS)
    context = dataclasses.replace(kit.context([[1, 2]]), target=jnp.zeros(1))
    jax.eval_shape(lambda: d.propose(small, d.init(small, 1, kit.SIZE), context))
    assert len(Reader.shown) > 1 and all(x is None for x in Reader.shown)


def test_drafters_that_commit_their_own_nodes_are_refused():
    with pytest.raises(ValueError, match="inner: got a SmallModel, takes one that keeps no state of its drafts"):
        Cascade(TARGET, SmallModel(TARGET, 2), 3)
    with pytest.raises(ValueError, match="k is 0"):
        Cascade(TARGET, NGram(), 0)
