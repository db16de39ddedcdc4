"""D10: the same key gives the same text: whatever the slot, the batch, the neighbours, and whether compiled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.engine import round as rounds
from spec_jax.engine.requests import request
from spec_jax.sampling.constraint import free
from spec_jax.sampling.history import History
from spec_jax.sampling.settings import Sampling, to_row
from spec_jax.tree import Draft, chain
from spec_jax.verify.match import match
from spec_jax.verify.scores import Scores
from tests.faults import kit
from tests.faults.lawkit import PLAIN, ROWS, TABLES, guess, sample
from tests.faults.oracle import generate

KEYS = 50
ONE = kit.row_tables(10, 1)
SAMPLING = Sampling(temperature=0.9, top_k=6, top_p=0.95)
NOISE = kit.gumbels(np.stack([kit.key_of(i) for i in range(KEYS)]))
WANT = [generate(kit.logits_of(ONE[0]), [3, 1], 16, SAMPLING, NOISE[i]) for i in range(KEYS)]
TEXTS = [[3, 1, *text.tokens] for text in WANT]


def run(seeds, counts=(3, 0, 1), size=kit.ROWS, how=kit.run):
    texts = [TEXTS[i] for i in seeds]
    e, params = kit.follow(jnp.repeat(ONE, size, axis=0), texts, counts=counts, length=4, size=size)
    return how(e, params, kit.batch([request(e, [3, 1], 16, i, SAMPLING) for i in seeds], size))


def test_batch_slot_and_repetition():
    seeds = [*range(KEYS), *reversed(range(KEYS))]
    states = [run(seeds) for _ in range(3)]
    for state in states:
        assert all(kit.same_text(state, row, WANT[i]) for row, i in enumerate(seeds))
        jax.tree.map(np.testing.assert_array_equal, state.rows, states[0].rows)
    logs = states[0].rows.log_probs
    np.testing.assert_array_equal(logs[:KEYS], logs[KEYS:][::-1])
    assert len({tuple(text.tokens) for text in WANT}) > KEYS / 2


def test_a_batch_of_one_and_other_drafts():
    many = run([*range(KEYS), *range(KEYS)])
    for i in range(KEYS):
        alone = run([i], counts=7 - i % 8, size=1)
        assert kit.same_text(alone, 0, WANT[i])
        np.testing.assert_allclose(alone.rows.log_probs[0], many.rows.log_probs[i], rtol=0, atol=1e-6)


def test_without_compilation():
    """The rule op by op, as it stands in the source, chooses what the compiled rule chooses."""
    tree = chain(jnp.int32(3), jnp.array([1, 4, 2]), jnp.int32(3))
    draft = Draft(tree, jnp.ones(4))
    compiled = jax.jit(lambda key, scores: match(key, draft, scores, 4))
    for i in range(3):
        row, past = to_row(Sampling(temperature=0.9), kit.WORDS), History(jnp.int32(0), jnp.int32(0))
        scores = Scores(ONE[0, 3, tree.tokens], row, past, jnp.int32(i), free(kit.WORDS), adjusted=False)
        with jax.disable_jit():
            plain = match(kit.key_of(i), draft, scores, 4)
        jax.tree.map(np.testing.assert_array_equal, plain, compiled(kit.key_of(i), scores))


def test_rejection_depends_on_the_row_alone():
    """The p/q rule gives other text than plain decoding, but the same for the same key and draft, in every slot."""
    target, draft = TABLES["RND"]
    order = np.random.default_rng(0).permutation(ROWS)
    texts, _ = sample(target, guess(draft, PLAIN), PLAIN, 3)
    moved, _ = sample(target, guess(draft, PLAIN), PLAIN, 3, order=order)
    assert (moved == texts[order]).all()


def test_noise_that_depends_on_the_slot_is_caught(monkeypatch):
    def by_slot(*given):
        context = whole(*given)
        return dataclasses.replace(context, key=context.key + jnp.arange(len(context.key), dtype=jnp.uint32)[:, None])

    whole = rounds.context_of
    monkeypatch.setattr(rounds, "context_of", by_slot)
    seeds = [*range(6), *reversed(range(6))]
    state = run(seeds, size=12, how=kit.run_anew)
    right = [kit.same_text(state, row, WANT[i]) for row, i in enumerate(seeds)]
    assert right[0] and sum(right) < 6  # slot 0 keeps its key
