"""Blocks behind rejected drafts in training: they are asked beside the first ones, and reach what reads the rest."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.train.block import BlockForward
from spec_jax.train.objective import Objective
from spec_jax.train.task import Task
from tests.faults.kit import jit
from tests.train import toy

CONFIG = toy.block_config(rejected="carryover")
KL = Objective((("ce", 0.5), ("forward_kl", 0.5)))


def task(forward, labels="again", objective=KL):
    return Task(forward, toy.target(), objective, anchors=4, steps=10, labels=labels)


def test_second_blocks_teach_what_reads_the_rejected_part():
    forward = BlockForward(dataclasses.replace(CONFIG, rejected="retrace"))
    params, batch = forward.init(jax.random.key(0), toy.params()), toy.batch(rows=4, length=16)
    made = task(forward)

    @jit
    def both(params):
        slots, said = made.slots(params, batch)
        return slots, said.rows.shape, jax.grad(lambda p: made.loss(p, batch)[0])(params)

    slots, rows, slope = both(params)
    assert slots.logits.shape == (32, 3, toy.V) and tuple(int(n) for n in rows) == (32, 4, 16)
    first, second = np.asarray(slots.scored[:16]), np.asarray(slots.scored[16:])
    assert first[:, 0].all() and second.any() and second.sum() < first.sum()
    learnt = slope.network.retrace.into.kernel
    assert np.isfinite(learnt).all() and np.abs(np.asarray(learnt)).max() > 0
    drafted, right = jnp.argmax(slots.logits[:16], -1), np.asarray(slots.labels[:16])
    ended = ((np.asarray(drafted) == right) & first).cumprod(-1).sum(-1)
    for i in range(16):
        if second[i, 0]:
            np.testing.assert_array_equal(slots.labels[16 + i, : 2 - ended[i]], right[i, ended[i] + 1 :])


def test_labels_that_do_not_fit_the_drafter_are_refused():
    with pytest.raises(ValueError, match="labels: got 'text' for a drafter with rejected=carryover"):
        task(BlockForward(CONFIG), "text")
    with pytest.raises(ValueError, match="labels: got 'again' for a drafter with rejected=None"):
        task(toy.Linear())
