"""The loss of a step against one that is put together by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.train import anchors, features
from spec_jax.train.objective import Objective
from spec_jax.train.task import Task
from tests.train import toy

FORWARD = toy.Linear()
CE, KL = Objective(), Objective((("forward_kl", 1.0),))


def task(objective=CE, forward=FORWARD, **options):
    return Task(forward, toy.target(), objective, **({"anchors": 4, "steps": 10} | options))


@functools.cache
def compiled(made, name="slots"):
    return jax.jit(getattr(made, name))


def slots(made, weights, batch):
    return compiled(made)(weights, batch)[0]


READ = jax.jit(lambda params, tokens, length: features.read(toy.target(), params, tokens, length))


def by_hand(weights, batch, found, kept=None):
    """Every slot's label, law and logits, one after another."""
    texts = batch.texts
    taps = READ(batch.target, texts.tokens, texts.length)
    keys = jax.random.split(jax.random.split(jax.random.fold_in(jax.random.key(0), batch.step), 3)[0], 2)
    for b in range(2):
        at, real = anchors.random_anchors(keys[b], texts.mask[b], 4)
        for r in range(4):
            for k in range(3):
                place = int(at[r]) + 1 + k
                counts = bool(real[r]) and place < 12 and bool(texts.mask[b, place])
                label = int(texts.tokens[b, min(place, 11)])
                if kept is not None:
                    counts, label = counts and label in kept, list(kept).index(label) if label in kept else 0
                assert bool(found.scored[b, r, k]) == counts
                if not counts:
                    continue
                assert int(found.labels[b, r, k]) == label
                logits = taps[b, at[r] - 1, 0] @ weights["feature"][k] + weights["token"][k, texts.tokens[b, at[r]]]
                np.testing.assert_allclose(found.logits[b, r, k], logits, rtol=1e-4, atol=1e-5)
                law = toy.target().logits(batch.target, taps[b : b + 1, place - 1 : place, 1])[0, 0]
                law = law if kept is None else law[np.asarray(kept)]
                np.testing.assert_allclose(found.target[b, r, k], law, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("step", [0, 3])
def test_slots_are_what_stands_behind_the_anchors(step):
    batch, weights = toy.batch(step=step), FORWARD.init()
    found = slots(task(KL), weights, batch)
    by_hand(weights, batch, found)
    assert found.scored.any()


def test_a_reduced_vocabulary_has_its_own_labels_and_law():
    kept = np.array([1, 2, 5, 7, 8, 11, 13, 17, 20, 21], np.int32)
    forward = toy.Linear(draft=len(kept))
    batch, weights = toy.batch(shared={"kept": jnp.asarray(kept)}), forward.init()
    found = slots(task(KL, forward, kept="kept"), weights, batch)
    by_hand(weights, batch, found, kept)
    assert found.scored.any() and np.isfinite(compiled(task(KL, forward, kept="kept"), "loss")(weights, batch)[0])


def test_anchors_are_drawn_anew_at_every_step():
    weights = FORWARD.init()
    label = lambda step: slots(task(), weights, toy.batch(step=step)).labels  # noqa: E731
    np.testing.assert_array_equal(label(1), label(1))
    assert not np.array_equal(label(1), label(2))


def test_cached_features_give_the_same_loss():
    weights, batch = FORWARD.init(), toy.batch()
    read = READ(batch.target, batch.texts.tokens, batch.texts.length)
    cached = dataclasses.replace(batch, texts=dataclasses.replace(batch.texts, features=read))
    loss = compiled(task(KL), "loss")
    np.testing.assert_allclose(loss(weights, batch)[0], loss(weights, cached)[0], rtol=1e-5)


def test_rollout_labels_are_the_targets_whatever_the_text_says():
    weights, batch = FORWARD.init(), toy.batch(length=8)
    found = slots(task(KL, labels="rollout"), weights, batch)
    np.testing.assert_array_equal(found.labels[found.scored], jnp.argmax(found.target, -1)[found.scored])
    blocks = np.asarray(found.scored)
    assert (
        set(blocks.sum(-1).ravel().tolist()) <= {0, 3} and blocks.any()
    )  # no slot is erased, not even behind the text
    ended = slots(task(KL, labels="rollout", eos=tuple(range(toy.V))), weights, batch)
    np.testing.assert_array_equal(ended.scored[..., 0], blocks[..., 0])
    assert not ended.scored[..., 1:].any()


def test_on_policy_slots_are_the_drafters_own():
    """The drafter all but surely drafts token 5; the law is the target's behind 5 and 5, 5."""
    weights = jax.tree.map(jnp.zeros_like, FORWARD.init())
    weights["token"] = weights["token"].at[:, :, 5].set(50.0)
    batch = toy.batch(length=8)
    o = Objective((("reverse_kl", 1.0),))
    found = slots(task(o, labels="draft"), weights, batch)
    assert (found.labels[found.scored] == 5).all() and found.scored.any()
    keys = jax.random.split(jax.random.split(jax.random.fold_in(jax.random.key(0), 0), 3)[0], 2)
    at, real = anchors.random_anchors(keys[0], batch.texts.mask[0], 4)
    text = jnp.concatenate([batch.texts.tokens[0, : at[0] + 1], jnp.array([5, 5])])[None]
    taps = READ(batch.target, text, jnp.array([text.shape[1]]))
    law = toy.target().logits(batch.target, taps[:, -3:, 1])[0]
    np.testing.assert_allclose(found.target[0, 0], law, rtol=1e-4, atol=1e-4)
    gradient = jax.jit(jax.grad(lambda w: task(o, labels="draft").loss(w, batch)[0]))(FORWARD.init())
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in jax.tree.leaves(gradient))


def test_the_curriculum_knows_how_far_it_is():
    class Based(toy.Linear):
        def __call__(self, weights, asked):
            said = super().__call__(weights, asked)
            return dataclasses.replace(said, base=0 * said.logits)

    o = Objective(base_until=0.5)
    loss = compiled(task(o, Based()), "loss")
    share = [float(loss(FORWARD.init(), toy.batch(step=s))[1]["base_share"]) for s in (0, 2, 5, 9)]
    np.testing.assert_allclose(share, [1, 0.6, 0, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"anchors": 0}, "anchors: got 0"),
        ({"steps": 0}, "steps: got 0"),
        ({"labels": "corpus"}, "labels: got 'corpus'"),
        ({"target": toy.target((2,))}, "target: got taps \\(2,\\), takes the forward's first, \\(1,\\)"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(task(), **options)


def test_a_text_counts_by_its_weight():
    """The loss is the mean over scored slots, each as often as its text's weight says."""
    weights, batch, loss = FORWARD.init(), toy.batch(length=10), compiled(task(), "loss")
    batch = dataclasses.replace(batch, texts=dataclasses.replace(batch.texts, length=jnp.array([10, 7])))

    def put(**changes):
        return dataclasses.replace(batch, texts=dataclasses.replace(batch.texts, **changes))

    count = slots(task(), weights, batch).scored.sum((1, 2))
    alone = [float(loss(weights, put(mask=batch.texts.mask & (jnp.arange(2) == i)[:, None]))[0]) for i in range(2)]
    assert count[0] != count[1] and alone[0] != pytest.approx(alone[1])
    for own in ([1.0, 3.0], [0.0, 0.5], [0.0, 0.0]):
        share = np.array(own) * np.asarray(count)
        want = share @ alone / max(share.sum(), 1e-9)
        np.testing.assert_allclose(loss(weights, put(weight=jnp.array(own)))[0], want, rtol=1e-5)
    tree = task(Objective(tree=1.0))
    with pytest.raises(ValueError, match="texts: got weights"):
        tree.loss(weights, put(weight=jnp.ones(2)))
