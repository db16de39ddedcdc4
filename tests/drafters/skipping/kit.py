"""A tiny Llama of five layers one of which does nothing, so that the best set of one skipped layer is known."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from spec_jax.drafters.skipping.drafter import Skipping
from spec_jax.engine.engine import Engine
from tests.drafters.block import kit

LAYERS = 5


@functools.cache
def idle(layer):
    """(target, parameters) of five layers, one of which leaves its input as it is; None: none does."""
    target, params = kit.llama(LAYERS)
    if layer is None:
        return target, params
    zero = lambda x: jax.tree.map(jnp.zeros_like, x)  # noqa: E731
    old = params.layers[layer]
    new = dataclasses.replace(old, o=zero(old.o), down=zero(old.down))
    return target, dataclasses.replace(params, layers=(*params.layers[:layer], new, *params.layers[layer + 1 :]))


def engine(target, search, k=3, **options):
    return Engine(target, 24, drafter=Skipping(target, search, k, **options), prefill_chunk=8)


@functools.cache
def plain(layer):
    """The rows of all prompts under all settings, decoded plainly."""
    target, params = idle(layer)
    return kit.decoded(Engine(target, 24, prefill_chunk=8), None, params)
