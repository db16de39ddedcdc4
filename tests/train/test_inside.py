"""Blocks inside rollouts (IRA): they are blocks of a text that goes on with the rollout."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spec_jax.train import branches, features
from spec_jax.train.objective import Objective
from spec_jax.train.task import Asked, Task
from tests.faults.kit import jit
from tests.train import toy

K = 4
FORWARD, TARGET, PARAMS = toy.Linear(slots=K), toy.target(), toy.params()
KL = Objective((("forward_kl", 1.0),))
READ = jit(lambda tokens, length: features.read(TARGET, PARAMS, tokens, length))


def task(objective=KL, forward=FORWARD, labels="inside", **options):
    return Task(forward, TARGET, objective, anchors=3, steps=10, labels=labels, **options)


VALUE_AND_SLOPE = jit(jax.value_and_grad(lambda weights, batch: task().loss(weights, batch)[0]))


def test_a_spliced_text_has_a_plain_passs_features():
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, toy.V, (2, 7)), jnp.int32)
    anchors, parent = jnp.array([[1, 3, 6], [2, 4, 5]]), jnp.array([[2, 0], [1, 1]])
    found = READ(tokens, jnp.array([7, 7]))
    grown = jit(branches.rollout, static_argnums=(0, 4))(TARGET, PARAMS, tokens, anchors, K)
    texts, taps = branches.spliced(tokens, found, anchors, grown, parent)
    assert texts.shape == (2, 2, 7 + K)
    for b, g in np.ndindex(2, 2):
        at = int(anchors[b, parent[b, g]])
        text = [*np.asarray(tokens[b, : at + 1]), *np.asarray(grown.tokens[b, parent[b, g]])]
        assert texts[b, g, : len(text)].tolist() == text and not texts[b, g, len(text) :].any()
        want = READ(texts[b, g][None], jnp.array([len(text)]))[0, : at + K]
        np.testing.assert_allclose(taps[b, g, : at + K], want, rtol=1e-4, atol=1e-5)
        assert not np.asarray(taps[b, g, at + K :]).any()


def test_blocks_inside_are_asked_behind_every_inner_token():
    """2 texts x 3 anchors, then 2 texts x offsets 2 and 3, each with what greedy decoding writes from there."""
    weights, batch = FORWARD.init(), toy.batch(length=9)
    found, said = jit(task().slots)(weights, batch)
    outer, _ = jit(task(labels="rollout").slots)(weights, batch)
    assert found.logits.shape == (10, K, toy.V) and said.logits.shape == (10, K, toy.V)
    np.testing.assert_array_equal(found.labels[:6], outer.labels.reshape(6, K))
    inner = [np.asarray(x[6:]).reshape(2, 2, *x.shape[1:]) for x in (found.labels, found.target, found.scored)]
    labels, laws, scored = inner
    np.testing.assert_array_equal(scored, np.broadcast_to(np.arange(K) < np.array([2, 1])[:, None], scored.shape))
    for b in range(2):
        hosts = [r for r in range(3) if (np.asarray(outer.labels[b, r, 2:]) == labels[b, 0, :2]).all()]
        assert any(np.allclose(outer.target[b, r, 2:], laws[b, 0, :2], rtol=1e-4) for r in hosts)
        assert labels[b, 1, 0] == labels[b, 0, 1]


def test_the_gradient_is_that_of_the_blocks_put_together_by_hand():
    weights, batch = FORWARD.init(), toy.batch(length=9)

    class Watched(toy.Linear):
        """Keeps what it was asked."""

        def __init__(self):
            super().__init__(slots=K)
            self.asked = []

        def __call__(self, weights, asked):
            self.asked.append(asked)
            return super().__call__(weights, asked)

    def asked(weights):
        watched = Watched()
        found, _ = task(forward=watched).slots(weights, batch)
        return found, [(a.tokens, a.features, a.anchors, a.real, a.blocks) for a in watched.asked]

    found, given = jit(asked)(weights)
    first, second = (Asked(*parts, jax.random.key(0), None, None) for parts in given)
    assert second.tokens.shape == (2, 9 + K) and second.anchors.shape == (2, K - 2)
    texts = READ(second.tokens, second.anchors[:, -1] + 1)
    for b, s in np.ndindex(2, K - 2):  # what a block sees is what a plain pass over its text gives
        at = int(second.anchors[b, s])
        np.testing.assert_allclose(second.features[b, at - 1], texts[b, at - 1], rtol=1e-4, atol=1e-5)

    def direct(weights):
        total = count = 0.0
        logits = [FORWARD(weights, a).logits.reshape(-1, K, toy.V) for a in (first, second)]
        for z, p, on in zip(jnp.concatenate(logits), found.target, found.scored, strict=True):
            q, law = jax.nn.log_softmax(z), jax.nn.log_softmax(p)
            total += jnp.where(on, (jnp.exp(law) * (law - q)).sum(-1), 0.0).sum()
            count += on.sum()
        return total / count

    value, slope = VALUE_AND_SLOPE(weights, batch)
    want, ours = jit(jax.value_and_grad(direct))(weights)
    np.testing.assert_allclose(value, want, rtol=1e-4)
    for a, b in zip(jax.tree.leaves(slope), jax.tree.leaves(ours), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


def test_the_loss_goes_down():
    weights, batch, optimizer = FORWARD.init(), toy.batch(length=9), optax.adam(0.05)

    @jit
    def step(weights, slope, state):
        change, state = optimizer.update(slope, state)
        return optax.apply_updates(weights, change), state

    state, losses = optimizer.init(weights), []
    for _ in range(20):
        value, slope = VALUE_AND_SLOPE(weights, batch)
        weights, state = step(weights, slope, state)
        losses.append(float(value))
    assert losses[-1] < 0.7 * losses[0]


def test_a_rollout_that_has_ended_holds_no_blocks():
    weights, batch = FORWARD.init(), toy.batch(length=9)
    found, _ = jit(task(eos=tuple(range(toy.V))).slots)(weights, batch)
    assert found.scored[:6, 0].any() and not found.scored[6:].any()


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="labels: got 'inside' for 2 slots, takes a drafter of 3 or more"):
        task(forward=toy.Linear(slots=2))
    with pytest.raises(ValueError, match="target: got branches without features"):
        made = branches.Branches(jnp.zeros((1, 1, 3), jnp.int32), jnp.zeros((1, 1, 3, 5)))
        branches.spliced(
            jnp.zeros((1, 4), jnp.int32), jnp.zeros((1, 4, 1, 2)), jnp.zeros((1, 1), int), made, jnp.zeros((1, 1), int)
        )
