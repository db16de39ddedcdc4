"""Improved MCSD: a static tree whose levels are a slice each, with a first level from the target's own logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from spec_jax.topology.static import Template, place
from spec_jax.tree import Draft


def by_level(template: Template) -> tuple[Template, tuple[int, ...]]:
    """The template's nodes level by level, and how many nodes there are down to each depth, 0 .. template.depth.

    The first sizes[d] nodes are the tree cut at depth d, and its ancestor mask the leading block of the whole mask:
    the "dynamic sliced topology-aware causal mask" of improved MCSD (arXiv 2409.10644). With the sizes as an engine's
    `widths`, a controller that picks one is that paper's early stop.
    """
    order = np.argsort(np.asarray(template.depths), kind="stable")
    position = np.argsort(order)
    parent = [-1 if template.parent[i] < 0 else int(position[template.parent[i]]) for i in order]
    sizes = np.cumsum(np.bincount(template.depths))
    return Template(tuple(parent), tuple(template.rank[i] for i in order)), tuple(int(n) for n in sizes)


def target_initialised(
    template: Template,
    anchor: Int[Array, ""],
    target_logits: Float[Array, "v"],
    ids: Int[Array, "d k"],
    chance: Float[Array, "d k"],
) -> Draft:
    """`place`, with the first level's tokens and chances from the target's logits and the drafter's below it ("point").

    ids[0] and chance[0] belong to depth 2. Our reading of "target model initialised" (improved MCSD, arXiv 2409.10644):
    the paper branches at the token that the target is about to emit; here that token is committed and is the anchor, so
    `target_logits` are what the target said after this token when it last scored it, or a cheap forward of it now.
    """
    top, first = lax.top_k(jax.nn.log_softmax(target_logits), ids.shape[1])
    return place(
        template,
        anchor,
        jnp.concatenate([jnp.where(top > -jnp.inf, first, -1)[None], ids]),
        jnp.concatenate([jnp.exp(top)[None], chance]),
    )
