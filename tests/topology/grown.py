"""What the tests of grown trees share: drafts as dictionaries of paths, and an expander that knows its tables."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from spec_jax.topology.growth import Ranked
from tests.topology import kit


def paths(draft):
    """{tokens on the root path: product of confidences on it} of the used nodes but the root, in node order."""
    chance = {(): 1.0}
    for path, confidence in kit.paths(draft).items():
        chance[path] = chance[path[:-1]] * confidence
    del chance[()]
    return chance


def row(draft, b):
    return jax.tree.map(lambda x: x[b], draft)


def best_paths(chances, n):
    """The n entries of greatest chance, greatest first."""
    return dict(sorted(chances.items(), key=lambda item: -item[1])[:n])


def by_law(logits, paths, depth):
    """Candidates by the law alone: all tokens."""
    ids = jnp.broadcast_to(jnp.arange(logits.shape[-1], dtype=jnp.int32), logits.shape)
    return Ranked(ids, jax.nn.log_softmax(logits), trace=paths)


@flax.struct.dataclass
class Seen:
    tokens: Array
    count: Array


@dataclasses.dataclass(frozen=True)
class TableExpander:
    """Logits by a node's token and its parent's; params [B, V, V, V]. Above the root stands token 0."""

    def start(self, growth, params, anchor):
        """The pool with the root, and the logits behind it."""
        tokens = jnp.full((len(anchor), growth.expanded), -(2**20)).at[:, 0].set(anchor)
        return Seen(tokens, jnp.int32(1)), jax.vmap(lambda table, a: table[0, a])(params, anchor)

    def expand(self, params, pool, parent, token):
        before = jnp.take_along_axis(pool.tokens, parent, axis=1)
        logits = jax.vmap(lambda table, a, b: table[a, b])(params, before, token)
        tokens = lax.dynamic_update_slice_in_dim(pool.tokens, token, pool.count, axis=1)
        return Seen(tokens, pool.count + token.shape[1]), logits


def tables(seed, batch, vocab, scale=1.5):
    return jnp.asarray(np.random.default_rng(seed).normal(0, scale, (batch, vocab, vocab, vocab)), jnp.float32)
