"""An adapter behind the target's first layers: it is all that is trained, and learns to say what the target says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spec_jax.drafters.early_exit import EarlyExitConfig
from spec_jax.models.llama import Llama
from spec_jax.train.early_exit import EarlyExitForward
from spec_jax.train.kinds import EarlyExitRecipe
from spec_jax.train.objective import Objective
from spec_jax.train.task import Task
from tests.drafters.block import kit
from tests.train import toy

TARGET = dataclasses.replace(kit.llama()[0], taps=(3,))
FORWARD = EarlyExitForward(EarlyExitConfig(kit.LLAMA, layers=1, adapter=2, depth=3))


def test_the_adapter_learns_what_the_target_says():
    params, weights = FORWARD.init(jax.random.key(0), kit.llama()[1]), kit.llama()[1]
    task = Task(FORWARD, TARGET, Objective((("forward_kl", 1.0),)), anchors=4, steps=40)
    given = toy.batch(rows=4, weights=weights)
    tokens = dataclasses.replace(given.texts, tokens=given.texts.tokens % kit.V)
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(carry, i):
        params, state = carry
        batch = dataclasses.replace(given, texts=tokens, step=i)
        (loss, _), slope = jax.value_and_grad(task.loss, has_aux=True)(params, batch)
        updates, state = optimizer.update(slope, state)
        return (optax.apply_updates(params, updates), state), loss

    (params, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), jnp.arange(40))
    losses = np.asarray(losses)
    assert np.isfinite(losses).all() and losses[-8:].mean() < 0.7 * losses[:4].mean()
    whole = FORWARD.as_drafter(params, weights)
    assert whole.layers[0].q.kernel is not None and len(whole.layers) == 2
    np.testing.assert_array_equal(whole.layers[0].q.kernel, weights.layers[0].q.kernel)
    np.testing.assert_array_equal(whole.embedding, weights.embedding)
    assert np.abs(whole.layers[1].q.kernel - weights.layers[2].q.kernel).max() > 0
    jax.tree.map(np.testing.assert_array_equal, FORWARD.trained(whole), params)


def test_sizes_that_do_not_fit_are_refused():
    assert isinstance(FORWARD.config.view(), Llama) and FORWARD.config.view().config.num_layers == 2
    assert EarlyExitRecipe(layers=1).forward(kit.LLAMA).config.adapter == 2
    for given, message in (((3, 2), "layers is 3"), ((0, 2), "layers is 0"), ((2, 1), "adapter is 1")):
        with pytest.raises(ValueError, match=message):
            EarlyExitConfig(kit.LLAMA, *given)
