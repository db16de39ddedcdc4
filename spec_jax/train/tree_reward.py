"""Group tree optimisation (GTO): a drafter is rewarded for the trees it grows, not for the tokens of one path.

From the abstract: a sampling-free draft-tree reward, advantages that are standardised within a group and debiased by a
frozen reference drafter, and a PPO-like surrogate along the longest accepted path. What the abstract leaves open is our
reading, said at each function.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from spec_jax import tree as trees
from spec_jax.tree import Tree


def tree_reward(tree: Tree, log_chance: Float[Array, "n"]) -> Float[Array, ""]:
    """Expected number of accepted nodes: the sum over nodes of the target's chance of their root path.

    log_chance[i] is the target's log-probability of node i's token behind its parent (the root's is unused). This is
    exact for verification by the target's own draws (`verify.match`), which descends while the draw is a child.
    """
    step = jnp.where((tree.parent >= 0) & tree.valid, log_chance, 0.0)
    reach = trees.ancestors(tree.parent)
    path = jnp.where(reach, step, 0.0).sum(-1)
    return jnp.where((tree.parent >= 0) & tree.valid, jnp.exp(path), 0.0).sum()


def longest_accepted(tree: Tree, choice: Int[Array, "n"]) -> Bool[Array, "n"]:
    """The nodes on the accepted path, without the root: choice[i] is the target's token behind node i."""
    right = (tree.parent < 0) | (tree.valid & (tree.tokens == choice[jnp.maximum(tree.parent, 0)]))
    reach = trees.ancestors(tree.parent)
    return (right | ~reach).all(-1) & (tree.parent >= 0)


def group_advantages(
    rewards: Float[Array, "g"],
    reference: Float[Array, "g"],
    real: Bool[Array, "g"] | None = None,
    epsilon: float = 1e-6,
) -> Float[Array, "g"]:
    """Rewards less those of the reference drafter's trees at the same places, standardised within the group.

    Our reading of "debiased": the reference takes out how easy a place is. A group without spread gets zeros, as does
    a place that is not `real` (None: all are), which the others' standard is taken without.
    """
    real = jnp.ones(rewards.shape, bool) if real is None else real
    gain, count = jnp.where(real, rewards - reference, 0.0), jnp.maximum(real.sum(), 1)
    apart = jnp.where(real, gain - gain.sum() / count, 0.0)
    spread = jnp.sqrt(jnp.square(apart).sum() / count)
    return lax.stop_gradient(apart / jnp.maximum(spread, epsilon))


def clipped_surrogate(
    log_q: Float[Array, "*b k"],
    log_old: Float[Array, "*b k"],
    advantage: Float[Array, "*b"],
    mask: Bool[Array, "*b k"],
    clip: float = 0.2,
) -> Float[Array, ""]:
    """The loss -mean of min(ratio A, clipped ratio A), ratio = q / q_old, over masked tokens (PPO, arXiv 1707.06347).

    The mask holds the tokens of the longest accepted path, each of which has its tree's advantage; 0 without any.
    """
    ratio = jnp.exp(jnp.where(mask, log_q - lax.stop_gradient(log_old), 0.0))
    a = advantage[..., None]
    gain = jnp.minimum(ratio * a, jnp.clip(ratio, 1 - clip, 1 + clip) * a)
    return -jnp.where(mask, gain, 0.0).sum() / jnp.maximum(mask.sum(), 1)
