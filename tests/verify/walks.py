"""One position at a time for the rule tests: small trees and their scores."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from spec_jax.sampling.constraint import free
from spec_jax.sampling.history import History
from spec_jax.sampling.settings import Sampling, to_row
from spec_jax.tree import Draft, Law, Proposal, Tree
from spec_jax.verify.scores import Scores


def draft(tokens, parent, valid=None, law=None, proposal: Proposal = "point") -> Draft:
    n = len(parent)
    tree = Tree(jnp.asarray(tokens), jnp.asarray(parent), jnp.ones(n, bool) if valid is None else jnp.asarray(valid))
    return Draft(tree, jnp.ones(n), None if law is None else Law(jnp.asarray(law, jnp.float32)), proposal)


def scores(logits, sampling=None, position=4, **flags) -> Scores:
    logits = jnp.asarray(logits, jnp.float32)
    vocab = logits.shape[-1]
    zero = jnp.int32(0)
    past = History(zero, zero, jnp.zeros(vocab, jnp.int32), jnp.zeros(vocab, bool))
    return Scores(logits, to_row(sampling or Sampling(), vocab), past, jnp.int32(position), free(vocab), **flags)


def keys(n, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 2**32, (n, 2), dtype=np.uint32))
