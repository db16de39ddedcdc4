"""Group tree optimisation over a batch: trees of what was said behind the anchors, the target's word on them, the loss.

See `tree_reward` for the parts. A tree combines the slots' own logits (DDTree's best-first order). For a head that
reads the tokens drafted before, those are its logits along the blocks that it was given: with labels "rollout", the
target's greedy text, of which the accepted path is the beginning.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from spec_jax import tree as trees
from spec_jax.models.target import Target
from spec_jax.topology.marginals import best_first
from spec_jax.train import branches, tree_reward
from spec_jax.tree import Tree


@dataclasses.dataclass(frozen=True)
class Judge:
    """What a tree is grown of and judged by.

    Attributes:
        target: the target, which scores text and trees in one pass.
        nodes: nodes of a tree, the anchor among them.
        children: likeliest tokens of each slot that are combined.
        clip: how far a token's chance may move from the reference's, as a ratio, before its gradient stops.
    """

    target: Target
    nodes: int = 16
    children: int = 4
    clip: float = 0.2

    def __call__(
        self,
        said: Float[Array, "b r k draft"],
        reference: Float[Array, "b r k draft"] | None,
        target_params: Any,
        tokens: Int[Array, "b t"],
        anchors: Int[Array, "b r"],
        real: Bool[Array, "b r"],
        kept: Int[Array, "draft"] | None = None,
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The surrogate's loss and the mean reward, an expected number of accepted tokens.

        A text's real anchors are a group. The reference is a frozen drafter's logits at the same slots: the policy that
        the ratio is taken to, and whose rewards are taken off. None: this drafter as it is, and nothing is taken off.
        """
        tree, reward, accepted = self._grown(said, target_params, tokens, anchors, kept)
        log_q = chosen(said, tree)
        old, base = log_q, jnp.zeros_like(reward)
        if reference is not None:
            old = chosen(reference, tree)
            base = self._grown(reference, target_params, tokens, anchors, kept)[1]
        advantage = jax.vmap(tree_reward.group_advantages)(reward, base, real)
        mask = accepted & real[..., None]
        loss = tree_reward.clipped_surrogate(log_q, old, advantage, mask, self.clip)
        return loss, jnp.where(real, reward, 0.0).sum() / jnp.maximum(real.sum(), 1)

    def _grown(
        self, said: Array, target_params: Any, tokens: Array, anchors: Array, kept: Array | None
    ) -> tuple[Tree, Array, Array]:
        """Trees in draft ids [B, R, N], their rewards [B, R], and the nodes of the longest accepted paths."""
        log_q, ids = lax.top_k(jax.nn.log_softmax(lax.stop_gradient(said)), self.children)
        grow = lambda q, i: best_first(q, i, jnp.int32(0), self.nodes).tree  # noqa: E731
        tree = jax.vmap(jax.vmap(grow))(log_q, ids)
        anchor = jnp.take_along_axis(tokens, anchors, axis=1)
        own = tree.tokens if kept is None else kept[tree.tokens]
        own = dataclasses.replace(tree, tokens=own.at[..., 0].set(anchor))
        logits = branches.judge(self.target, target_params, tokens, anchors, own)
        above = jnp.maximum(own.parent, 0)
        law = jnp.take_along_axis(jax.nn.log_softmax(logits), above[..., None], axis=2)
        chance = jnp.take_along_axis(law, own.tokens[..., None], axis=3)[..., 0]
        rewards = jax.vmap(jax.vmap(tree_reward.tree_reward))(own, chance)
        accepted = jax.vmap(jax.vmap(tree_reward.longest_accepted))(own, jnp.argmax(logits, -1))
        return tree, lax.stop_gradient(rewards), accepted


def chosen(said: Float[Array, "b r k draft"], tree: Tree) -> Float[Array, "b r n"]:
    """The drafter's log-chance of each node's token at its depth; the root's is not looked at."""
    slot = jnp.maximum(jax.vmap(jax.vmap(trees.depth))(tree.parent) - 1, 0)
    rows = jnp.take_along_axis(jax.nn.log_softmax(said), slot[..., None], axis=2)
    return jnp.take_along_axis(rows, tree.tokens[..., None], axis=3)[..., 0]
