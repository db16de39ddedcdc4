"""The temperatures of a confidence head, on drafts of which it is known how often they are right."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.train import features
from spec_jax.train.confidence import calibrated
from spec_jax.train.objective import Objective
from spec_jax.train.slots import Said
from spec_jax.train.task import Task
from tests.train import toy

TEACHER, WEIGHTS = features.with_last(toy.target((1,)), toy.LAYERS), toy.params()
SURE = np.array([3.0, 0.5])


@flax.struct.dataclass
class Head:
    temperature: jax.Array


@flax.struct.dataclass
class Params:
    head: Head


class Drawn:
    """A drafter that is right with the chance sigmoid(z), and says SURE * z."""

    taps, slots = (1,), 2

    def __call__(self, params, asked):
        one, two = jax.random.split(asked.key)
        z = 1.5 * jax.random.normal(one, asked.blocks.shape)
        right = jax.random.uniform(two, z.shape) < jax.nn.sigmoid(z)
        logits = 9.0 * jax.nn.one_hot(jnp.where(right, asked.blocks, (asked.blocks + 1) % toy.V), toy.V)
        return Said(logits, confidence=SURE * z / params.head.temperature)


def made(temperature=(1.0, 1.0)):
    return Params(Head(jnp.asarray(temperature)))


def task(**options):
    return Task(Drawn(), TEACHER, Objective(confidence=1.0), anchors=40, steps=1, **options)


class Batches:
    def __getitem__(self, i):
        return toy.batch(rows=8, length=40, step=i, weights=WEIGHTS, seed=i)


def test_the_temperatures_by_which_it_is_too_sure_are_found():
    """Whatever they were before, and whatever labels it learnt from; drafts that a text cuts short have no say."""
    found = calibrated(task(), made(), Batches(), 12).head.temperature
    np.testing.assert_allclose(found, SURE, rtol=0.3)
    again = calibrated(task(labels="draft"), made((2.0, 4.0)), Batches(), 12).head.temperature
    np.testing.assert_array_equal(again, found)


class Same(Drawn):
    """The target itself as its drafter, which is not sure."""

    def __call__(self, params, asked):
        at = jnp.minimum(asked.anchors[..., None] + jnp.arange(2), asked.tokens.shape[1] - 1)
        law = TEACHER.logits(asked.target, asked.features[:, :, -1])
        return Said(jax.vmap(lambda law, at: law[at])(law, at), confidence=jnp.ones(at.shape))


@pytest.mark.parametrize(("temperature", "found"), [(0.7, 0.1), (0.0, 10.0)])
def test_drafts_are_accepted_as_at_the_temperature(temperature, found):
    """What is drawn from the target's law always is; its likeliest token hardly ever stands in a text of noise."""
    same = dataclasses.replace(task(), forward=Same())
    head = calibrated(same, made(), Batches(), 1, temperature).head
    np.testing.assert_allclose(head.temperature, found, rtol=1e-6)


def test_what_has_no_confidence_is_named():
    with pytest.raises(ValueError, match="params: got a head NoneType without confidence"):
        calibrated(task(), Params(None), Batches(), 1)

    class Short(Batches):
        def __getitem__(self, i):
            return toy.batch(rows=2, length=2, prompt=1)

    with pytest.raises(ValueError, match="batches: got texts without a draft of 2 tokens"):
        calibrated(dataclasses.replace(task(), anchors=2), made(), Short(), 1)
