"""The target's law at every node of a tree, for rules that weigh whole paths."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from spec_jax import tree as trees
from spec_jax.sampling.history import History
from spec_jax.tree import Tree
from spec_jax.verify.scores import Scores


def node_laws(tree: Tree, scores: Scores) -> Float[Array, "n vocab"]:
    """Probabilities of the token after each node, transformed with the history that the node's path makes.

    Row i is NaN where the node's logits hold a NaN or allow no token. Rows of nodes that are not valid mean nothing.
    Costs N transforms, one after another; a rule that walks down pays for its path alone.
    """
    index = jnp.arange(tree.tokens.shape[0])
    reach = trees.ancestors(tree.parent) & (index > 0)
    states = _states(tree, scores)

    def one(i: Array) -> Array:
        past, path = scores.history, reach[i]
        counts = None if past.counts is None else past.counts.at[tree.tokens].add(path.astype(jnp.int32))
        here = History(past.generated + path.sum(dtype=jnp.int32), states[i], counts, past.in_prompt)
        return jnp.exp(scores.log_probs(scores.z(i, here)))

    return lax.map(one, index)


def _states(tree: Tree, scores: Scores) -> Int[Array, "n"]:
    """The constraint's state after each node's token."""

    def step(i, states):
        return states.at[i].set(scores.constraint.step(states[tree.parent[i]], tree.tokens[i]))

    n = tree.tokens.shape[0]
    return lax.fori_loop(1, n, step, jnp.full(n, scores.history.state))
