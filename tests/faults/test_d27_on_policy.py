"""D27: rollouts on policy have ratio one: log-probs are the policy's own at every emitted token, and nowhere else."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spec_jax.drafters.siblings import Siblings
from spec_jax.rollout import memory
from spec_jax.rollout.engine import RolloutEngine
from spec_jax.rollout.log_probs import teacher_forced
from spec_jax.sampling.settings import Sampling
from spec_jax.verify.match import match
from spec_jax.verify.verdict import Walk
from tests.rollout import kit

WORDS, EOS, PAD, BUDGET, GROUP = 24, 3, 23, 20, 4
RNG = np.random.default_rng(27)
PROMPTS = [RNG.integers(4, WORDS - 1, 3 + i % 5).tolist() for i in range(64)]
TARGET, PARAMS = kit.small_llama(WORDS)
OTHER = kit.small_llama(WORDS, seed=1)[1]
DRAFTER = Siblings(nodes=4, candidates=4, longest=6, peers=2, memory=96)
SETTINGS = {
    "0.6": Sampling(temperature=0.6),
    "1": Sampling(temperature=1.0),
    "truncated": Sampling(temperature=0.6, top_p=0.8),
}


def rollouts(rule=match, sizes=(64,), **options):
    engine = kit.engine(DRAFTER, target=TARGET, rule=rule, widths=(4,))
    return RolloutEngine(engine, PARAMS, sizes=sizes, eos=(EOS,), pad_id=PAD, prefill_rows=32, **options)


@pytest.fixture(scope="module")
def engine():
    return rollouts()


def roll(engine, name, key=1):
    return engine.generate(PROMPTS, BUDGET, group=GROUP, sampling=SETTINGS[name], key=key)


def error(rollout, params, temperature):
    """The greatest difference to teacher forcing over the texts, every token of which is scored in its place."""
    text, length = np.zeros((len(rollout.tokens), 32), np.int32), []
    for row, (tokens, mask) in enumerate(zip(rollout.tokens, rollout.mask, strict=True)):
        whole = [*PROMPTS[row // GROUP], *tokens[mask]]
        text[row, : len(whole)] = whole
        length.append(len(whole))
    logs = np.asarray(teacher_forced(TARGET, params, jnp.asarray(text), jnp.asarray(length), temperature, 16))
    apart = 0.0
    for row, mask in enumerate(rollout.mask):
        start = len(PROMPTS[row // GROUP])
        apart = max(apart, abs(logs[row, start : start + mask.sum()] - rollout.log_probs[row, mask]).max())
    return apart


@pytest.mark.parametrize("name", SETTINGS)
def test_ratio_is_one(engine, name):
    rollout = roll(engine, name)
    temperature = SETTINGS[name].temperature
    assert error(rollout, PARAMS, temperature) < 1e-5
    assert len(rollout.mask) == 256 and rollout.acceptance_length > 1.02
    length = rollout.length
    assert (rollout.mask == (np.arange(BUDGET) < length[:, None])).all()
    ends = rollout.tokens[np.arange(256), length - 1] == EOS
    assert (ends | (length == BUDGET)).all() and ends.any() and not ends.all()
    assert (rollout.tokens[~rollout.mask] == PAD).all() and (rollout.log_probs[~rollout.mask] == 0).all()


def test_another_convention_is_caught(engine):
    """Untempered values; and a trainer that takes another temperature."""
    wrong, right = roll(rollouts(convention="raw"), "0.6"), roll(engine, "0.6")
    np.testing.assert_array_equal(wrong.tokens, right.tokens)
    assert error(wrong, PARAMS, 0.6) > 1e-2 > 1e-5 > error(right, PARAMS, 0.6)
    assert error(right, PARAMS, 1.0) > 1e-2 > 1e-5 > error(wrong, PARAMS, 1.0)


def test_a_slot_late_is_caught(engine):
    rollout = roll(engine, "1")
    rollout.log_probs[:, 1:] = rollout.log_probs[:, :-1].copy()
    assert error(rollout, PARAMS, 1.0) > 1e-2


def test_a_stale_policy_is_caught_and_stale_drafts_change_nothing(engine):
    """After a sync the outputs of the old policy still draft: the text is that of an engine that never saw them."""
    saved = engine.state()
    assert (np.asarray(saved["memory"].tokens) >= 0).any()
    engine.update_params(OTHER)
    synced = roll(engine, "1")
    assert error(synced, OTHER, 1.0) < 1e-5 < 1e-2 < error(synced, PARAMS, 1.0)
    engine.restore({**saved, "memory": memory.clear(saved["memory"], jnp.arange(len(saved["prompts"])))})
    clean = roll(engine, "1")
    np.testing.assert_array_equal(synced.tokens, clean.tokens)
    assert (synced.rounds != clean.rounds).any()
    engine.update_params(PARAMS)
    assert error(roll(engine, "1"), OTHER, 1.0) > 1e-2


def trusting(key, draft, scores, m):
    """A rule that takes what was drafted."""
    index = jnp.arange(draft.tree.tokens.shape[0])

    def step(walk):
        z = scores.z(walk.node, walk.history)
        own = scores.choose(z, key, scores.position + walk.verdict.accepted)
        below = (draft.tree.parent == walk.node) & draft.tree.valid & (index > 0)
        child = jnp.argmax(below)
        token = jnp.where(below.any(), draft.tree.tokens[child], own)
        return walk.emit(token, jnp.where(below.any(), child, 0), z, scores)

    return lax.while_loop(lambda walk: ~walk.done, step, Walk.start(scores, m)).verdict


def test_stale_drafts_that_change_the_text_are_caught(engine):
    """The fault gives right log-probs of wrong tokens: only the tokens tell."""
    wrong, right = roll(rollouts(trusting), "1"), roll(engine, "1")
    assert error(wrong, PARAMS, 1.0) < 1e-5
    assert (wrong.tokens != right.tokens).any()
