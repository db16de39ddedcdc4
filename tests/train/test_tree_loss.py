"""Group tree optimisation over a batch: rewards by plain passes, the gradient by the formula, a reward that grows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spec_jax.train import features, tree_loss
from spec_jax.train.objective import Objective
from spec_jax.train.task import Task
from tests.faults.kit import jit
from tests.train import toy

FORWARD, TARGET, PARAMS = toy.Linear(), toy.target(), toy.params()
GTO = Objective(tree=1.0, tree_nodes=5, tree_children=3)
JUDGE = tree_loss.Judge(TARGET, nodes=5, children=3)
TOKENS = jnp.asarray(np.random.default_rng(5).integers(0, toy.V, (2, 7)), jnp.int32)
ANCHORS = jnp.array([[1, 3, 6], [2, 4, 4]])
REAL = jnp.array([[True, True, True], [True, True, False]])
READ = jit(lambda tokens, length: TARGET.logits(PARAMS, features.read(TARGET, PARAMS, tokens, length)[:, :, -1]))


def law(text):
    """The target's log-law behind a text, by a plain pass."""
    tokens = jnp.zeros((1, 12), jnp.int32).at[0, : len(text)].set(jnp.array(text))
    z = np.asarray(READ(tokens, jnp.array([len(text)]))[0, len(text) - 1], np.float64)
    return z - np.log(np.exp(z - z.max()).sum()) - z.max()


@functools.cache
def spoken():
    """Logits by which some of what the target writes is in the trees, and a reference's."""
    said = np.random.default_rng(6).normal(0, 2, (2, 3, 3, toy.V))
    for b, r in np.ndindex(2, 3):
        text = np.asarray(TOKENS[b, : int(ANCHORS[b, r]) + 1]).tolist()
        for k in range(2 if r == 0 else 1):
            text.append(int(law(text).argmax()))
            said[b, r, k, text[-1]] += 5
    old = said + np.random.default_rng(7).normal(0, 0.3, said.shape)
    return jnp.asarray(said, jnp.float32), jnp.asarray(old, jnp.float32)


def by_hand(said):
    """Every anchor's reward, of its best-first tree as paths of tokens, and the path that greedy decoding accepts."""
    log_q = np.asarray(jax.nn.log_softmax(said), np.float64)
    rewards, accepted = np.zeros((2, 3)), {}
    for b, r in np.ndindex(2, 3):
        text, grown = np.asarray(TOKENS[b, : int(ANCHORS[b, r]) + 1]).tolist(), [()]
        top = [np.argsort(-log_q[b, r, k])[:3] for k in range(3)]
        score = lambda path: sum(log_q[b, r, k, x] for k, x in enumerate(path))  # noqa: B023, E731
        while len(grown) < 5:
            ends = [(*p, int(x)) for p in grown if len(p) < 3 for x in top[len(p)]]
            grown.append(max((p for p in ends if p not in grown), key=score))
        for path in grown[1:]:
            rewards[b, r] += np.exp(sum(law([*text, *path[:k]])[x] for k, x in enumerate(path)))
        path = ()
        while (longer := (*path, int(law([*text, *path]).argmax()))) in grown:
            path = longer
        accepted[b, r] = path
    return rewards, accepted


def test_loss_and_gradient_are_the_formulas():
    given, old = spoken()
    rewards, accepted = by_hand(given)
    base, _ = by_hand(old)
    assert any(accepted.values())

    def direct(said):
        log_q, log_old, total, count = jax.nn.log_softmax(said), jax.nn.log_softmax(old), 0.0, 0
        for b in range(2):
            group = [r for r in range(3) if REAL[b, r]]
            gain = (rewards - base)[b, group]
            for r, advantage in zip(group, (gain - gain.mean()) / gain.std(), strict=True):
                for k, x in enumerate(accepted[b, r]):
                    ratio = jnp.exp(log_q[b, r, k, x] - log_old[b, r, k, x])
                    total += jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
                    count += 1
        return -total / count

    @jit
    def ours(said):
        run = lambda x: JUDGE(x, old, PARAMS, TOKENS, ANCHORS, REAL)  # noqa: E731
        return jax.value_and_grad(run, has_aux=True)(said)

    (loss, reward), gradient = ours(given)
    want, slope = jax.value_and_grad(direct)(given)
    np.testing.assert_allclose(reward, rewards[np.asarray(REAL)].mean(), rtol=1e-4)
    np.testing.assert_allclose(loss, want, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(gradient, slope, rtol=1e-3, atol=1e-6)
    assert np.abs(slope).max() > 0


@functools.cache
def task(kept=None, **options):
    forward = FORWARD if kept is None else toy.Linear(draft=len(kept))
    return Task(forward, TARGET, GTO, anchors=4, steps=10, kept=None if kept is None else "kept", **options)


def test_steps_lower_the_loss_and_raise_the_reward():
    """On one batch, beside the cross-entropy to the target's own text, against another drafter as it is."""
    made = task(reference="reference", labels="rollout")
    weights, batch = FORWARD.init(), toy.batch(rows=4, shared={"reference": FORWARD.init(1)})
    optimizer = optax.adam(0.05)

    @jit
    def step(weights, state):
        (_, metrics), slope = jax.value_and_grad(made.loss, has_aux=True)(weights, batch)
        change, state = optimizer.update(slope, state)
        return optax.apply_updates(weights, change), state, metrics

    state, seen = optimizer.init(weights), []
    for _ in range(25):
        weights, state, metrics = step(weights, state)
        seen.append([float(metrics[name]) for name in ("loss", "tree_loss", "tree_reward")])
    first, last = np.array(seen[0]), np.array(seen[-5:]).mean(0)
    assert last[0] < 0.8 * first[0] and last[2] > 1.2 * first[2], (first, last)


def test_a_surrogate_alone_moves_what_is_accepted():
    """Accepted tokens of places that are better than their group's mean become likelier, others less likely."""
    judge = functools.partial(JUDGE, reference=None, target_params=PARAMS, tokens=TOKENS, anchors=ANCHORS, real=REAL)
    given, _ = spoken()
    slope = jit(jax.grad(lambda x: judge(x)[0]))(given)
    rewards, accepted = by_hand(given)
    for b in range(2):
        group = [r for r in range(3) if REAL[b, r]]
        for r in group:
            for k, x in enumerate(accepted[b, r]):
                assert np.sign(slope[b, r, k, x]) == -np.sign(rewards[b, r] - rewards[b, group].mean())
    assert not np.asarray(slope)[1, 2].any()


def test_it_is_a_part_of_the_tasks_loss():
    weights = FORWARD.init()
    batch = toy.batch(shared={"reference": FORWARD.init(1)})
    run = lambda made: jit(made.loss)(weights, batch)  # noqa: E731
    total, metrics = run(task(reference="reference"))
    np.testing.assert_allclose(total, metrics["draft_loss"] + metrics["tree_loss"], rtol=1e-6)
    assert metrics["loss"] == total and metrics["tree_reward"] > 0
    half = dataclasses.replace(task(), objective=dataclasses.replace(GTO, tree=0.5))
    alone, own = run(half)
    assert own["tree_reward"] == metrics["tree_reward"]
    np.testing.assert_allclose(alone, own["draft_loss"] + 0.5 * own["tree_loss"], rtol=1e-6)


def test_a_reduced_vocabularys_trees_are_of_its_tokens():
    kept = (1, 2, 5, 7, 8, 11, 13, 17, 20, 21)
    made, ids = task(kept), jnp.asarray(kept)
    weights = made.forward.init()
    batch = toy.batch(shared={"kept": ids})
    wide = toy.Linear()
    spread = {name: jnp.full((*x.shape[:-1], toy.V), -1e9).at[..., ids].set(x) for name, x in weights.items()}
    _, narrow = jit(made.loss)(weights, batch)
    spread["feature"] = jnp.zeros(spread["feature"].shape).at[..., ids].set(weights["feature"])
    _, whole = jit(dataclasses.replace(made, forward=wide, kept=None).loss)(spread, batch)
    np.testing.assert_allclose(narrow["tree_reward"], whole["tree_reward"], rtol=1e-5)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="tree_nodes: got 1, takes an integer in"):
        Objective(tree_nodes=1)
    with pytest.raises(ValueError, match="tree: got -1"):
        Objective(tree=-1)
    with pytest.raises(ValueError, match="reference: got 'reference' with an objective without tree"):
        dataclasses.replace(task(reference="reference"), objective=Objective())
    assert Objective.from_dict({"tree": 0.5, "tree_nodes": 8}).tree_nodes == 8
