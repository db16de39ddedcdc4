"""Stochastic beam search: whole paths drawn without replacement, a fixed number of nodes a level."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from spec_jax import noise
from spec_jax.topology.compact import compact
from spec_jax.topology.sampled import NextLaw, draw_key, unseen_peak
from spec_jax.tree import Draft, Law, Tree


@flax.struct.dataclass
class Beams:
    """A level's nodes, best first: their tokens, the beam each hangs below, and what the next step needs.

    log_prob is that of the path, perturbed the path's Gumbel-perturbed log-prob; -inf where there is no node.
    """

    tokens: Int[Array, "w"]
    parent: Int[Array, "w"]
    log_prob: Float[Array, "w"]
    perturbed: Float[Array, "w"]
    confidence: Float[Array, "w"]


def beam_step(
    key: noise.Key,
    log_q: Float[Array, "p v"],
    log_prob: Float[Array, "p"],
    perturbed: Float[Array, "p"],
    width: int,
    position: Int[Array, ""],
    nodes: Int[Array, "p"],
) -> Beams:
    """The `width` children of a level's p nodes with the greatest perturbed log-prob.

    A child's perturbed log-prob is Gumbel noise around its path's log-prob, conditioned on the greatest among siblings
    being the parent's. Siblings come in the order of draws without replacement from the parent's law, and how many of
    them there are depends on no token that is not drawn yet, so the rule for drafts drawn without replacement is exact.

    Args:
        key: the request's key.
        log_q: the laws of what follows each node.
        log_prob: log-prob of each node's path under those laws; 0 for the root.
        perturbed: each path's perturbed log-prob, -inf for a node that is none; 0 for the root.
        width: how many children in all.
        position: text position of the children.
        nodes: the nodes' indices in the draft, which key their draws.

    Source: Kool et al., arXiv 1903.06059; RSD-S, arXiv 2402.14160.
    """
    vocab = log_q.shape[1]
    ids = jnp.arange(vocab, dtype=jnp.int32)
    path = log_prob[:, None] + log_q
    noisy = path + jax.vmap(lambda i: noise.gumbel(draw_key(key, i), position, ids))(nodes)
    peak = noisy.max(-1, keepdims=True)
    given = perturbed[:, None]
    lower = given - noisy + jnp.log(-jnp.expm1(noisy - peak))
    conditioned = given - jnp.maximum(lower, 0.0) - jnp.log1p(jnp.exp(-jnp.abs(lower)))
    conditioned = jnp.where((given > -jnp.inf) & (noisy > -jnp.inf), conditioned, -jnp.inf).reshape(-1)
    take = min(width, conditioned.shape[0])
    top, pick = lax.top_k(conditioned, take)
    parent, tokens = pick // vocab, pick % vocab
    index = jnp.arange(take)
    elder = (parent[:, None] == parent[None]) & (index[None] < index[:, None])
    likely, likely_ids = lax.top_k(log_q, min(take, vocab))
    confidence = unseen_peak(likely[parent], likely_ids[parent], tokens, elder)
    found = top > -jnp.inf
    fill = lambda x, value: jnp.pad(x, (0, width - take), constant_values=value)  # noqa: E731
    return Beams(
        tokens=fill(jnp.where(found, tokens, 0), 0),
        parent=fill(jnp.where(found, parent, 0), 0),
        log_prob=fill(jnp.where(found, path.reshape(-1)[pick], -jnp.inf), -jnp.inf),
        perturbed=fill(top, -jnp.inf),
        confidence=fill(jnp.where(found, confidence, 0.0), 0.0),
    )


def stochastic_beam(
    key: noise.Key, anchor: Int[Array, ""], next_law: NextLaw, width: int, depth: int, position: Int[Array, ""]
) -> Draft:
    """The tree of a stochastic beam search: 1 + width x depth nodes, level by level ("without_replacement").

    `next_law` and `position` are as for `branching`. Source: RSD-S, arXiv 2402.14160.

    Raises:
        ValueError: for a width or depth below 1.
    """
    if width < 1 or depth < 1:
        raise ValueError(f"width: got {width} down to depth {depth}, takes at least 1 of each")
    level = Beams(jnp.asarray(anchor, jnp.int32)[None], jnp.full(1, -1), jnp.zeros(1), jnp.zeros(1), jnp.ones(1))
    levels, laws, start = [level], [], 0
    for d in range(depth):
        log_q = jax.vmap(next_law, (0, None))(level.tokens, jnp.int32(d))
        nodes = start + jnp.arange(level.tokens.shape[0])
        level = beam_step(key, log_q, level.log_prob, level.perturbed, width, position + d, nodes)
        laws += ([jnp.zeros((1, log_q.shape[1]))] if d == 0 else []) + [log_q[level.parent]]
        levels.append(dataclasses.replace(level, parent=nodes[level.parent]))
        start += nodes.shape[0]
    whole = jax.tree.map(lambda *x: jnp.concatenate(x), *levels)
    tree = Tree(whole.tokens.astype(jnp.int32), whole.parent.astype(jnp.int32), whole.perturbed > -jnp.inf)
    return compact(Draft(tree, whole.confidence, Law(jnp.concatenate(laws)), "without_replacement"), tree.valid)
