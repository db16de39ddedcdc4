"""EAGLE heads as drafters: one step after another (EAGLE-1, -2, -3), or all depths in one pass (P-EAGLE)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.tree_attention import tree_attention
from spec_jax import tree as trees
from spec_jax.drafters import pair_cache
from spec_jax.drafters.depth_tree import DepthShape, DepthTree, context_free
from spec_jax.drafters.eagle import network
from spec_jax.drafters.eagle.config import EagleConfig
from spec_jax.drafters.eagle.network import EagleParams
from spec_jax.drafters.head_tree import HeadTree
from spec_jax.drafters.pair_cache import PairCache
from spec_jax.models.config import require
from spec_jax.models.llama import AttentionState, StagedRows
from spec_jax.topology.branching import Branching
from spec_jax.topology.coupling import Learner
from spec_jax.topology.expander import Expander
from spec_jax.topology.growth import Growth
from spec_jax.tree import Tree


@dataclasses.dataclass(frozen=True)
class EagleHead(PairCache):
    """The network as a `Head`: keys and values of committed pairs, made of the target's own features, are its state."""

    config: EagleConfig

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self.config.vocab_size

    def init(self, params: EagleParams, batch: int, max_len: int) -> tuple[AttentionState, Float[Array, "b hidden"]]:
        """No pairs, room for all of a text."""
        c, dtype = self.config, params.network.layers[0].mlp_norm.dtype
        return pair_cache.empty(c, batch, max_len, dtype), jnp.zeros((batch, c.hidden_size), dtype)

    def taken(self, features: Float[Array, "b n taps hidden"]) -> Float[Array, "b n taps hidden"]:
        """All tapped states; ValueError for others than the config's."""
        want, got = (len(self.config.taps), self.config.hidden_size), features.shape[2:]
        if got != want:
            raise ValueError(
                f"features: got {got[0]} of size {got[1]}, takes {want[0]} of size {want[1]} (see `tapped`)"
            )
        return features

    def context(self, params: EagleParams, taken: Float[Array, "b n taps hidden"]) -> Float[Array, "b n hidden"]:
        """The features."""
        return network.feature(self.config, params, taken)

    def score(
        self,
        params: EagleParams,
        state: AttentionState,
        context: Float[Array, "b n hidden"],
        tree: Tree,
        staged: StagedRows | None = None,
        nodes: tuple[Int[Array, ""] | int, int] | None = None,
    ) -> tuple[Float[Array, "b n hidden"], StagedRows]:
        """Outputs behind pairs, over the committed ones and their ancestors; the state does not change."""
        start, n = (0, tree.tokens.shape[1]) if nodes is None else nodes
        rows = lambda x: lax.dynamic_slice_in_dim(x, start, n, axis=1)  # noqa: E731
        reach = jax.vmap(trees.ancestors)(tree.parent)
        position = state.length[:, None] + reach.sum(-1, dtype=jnp.int32) - 1
        mask, new = rows(reach), []

        def attend(i: int, q: Array, k: Array, v: Array) -> Array:
            k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
            if staged is not None:
                k = lax.dynamic_update_slice_in_dim(staged.k[i], k, start, axis=2)
                v = lax.dynamic_update_slice_in_dim(staged.v[i], v, start, axis=2)
            new.append((k, v))
            scale = self.config.head_dim**-0.5
            return tree_attention(q, state.k[i], state.v[i], state.length, k, v, mask, scale)

        x = network.run(self.config, params, context, rows(tree.tokens), rows(position), state.room, attend)
        return x, StagedRows(tuple(k for k, _ in new), tuple(v for _, v in new))

    def logits(self, params: EagleParams, context: Float[Array, "b n hidden"]) -> Float[Array, "b n vocab"]:
        """Over the target's vocabulary."""
        return network.full_logits(self.config, params, network.draft_logits(self.config, params, context))

    def root(
        self,
        params: EagleParams,
        state: AttentionState,
        context: Float[Array, "b hidden"],
        anchor: Int[Array, "b"],
        shape: Growth | Branching,
    ) -> tuple[Expander, Any, Any, Float[Array, "b vocab"]]:
        """P-EAGLE: every depth's logits by one pass over masked pairs, whatever is drafted."""
        return context_free(self.marginals(params, state, context, shape.depth))

    def marginals(
        self, params: EagleParams, state: AttentionState, context: Float[Array, "b hidden"], depth: int
    ) -> Float[Array, "b d vocab"]:
        """Logits of every depth: the first behind the last pair, the others behind masked pairs after it."""
        first = self.logits(params, context[:, None])
        if depth == 1:
            return first
        assert self.config.mask_token is not None
        shape = (context.shape[0], depth - 1)
        masked = jnp.broadcast_to(network.masked_feature(self.config, params), (*shape, context.shape[1]))
        parent = jnp.broadcast_to(jnp.arange(-1, depth - 2, dtype=jnp.int32), shape)
        tree = Tree(jnp.full(shape, self.config.mask_token, jnp.int32), parent, jnp.ones(shape, bool))
        out, _ = self.score(params, state, masked, tree)
        return jnp.concatenate([first, self.logits(params, out)], axis=1)


def drafter(
    config: EagleConfig, shape: Growth | Branching | DepthShape, learner: Learner | None = None
) -> HeadTree | DepthTree:
    """A drafter for a target with the config's taps (see `tapped`); its parameters are `EagleParams`.

    A `Growth` with ranking "point" and width = children is EAGLE-2's tree (arXiv 2406.16858); verify it and coupled
    ones with `match`. A `Branching` draws its tokens, for the p/q rules. A config with a mask_token drafts all depths
    in one pass, and combines marginals with a `BestFirst` as well.

    Raises:
        ValueError: for a shape of marginals and a head whose depths come one after another.
    """
    learner, head = learner or Learner(), EagleHead(config)
    if config.mask_token is not None:
        return DepthTree(head, shape, learner)
    if not isinstance(shape, Growth | Branching):
        raise ValueError(f"shape: got {type(shape).__name__}, takes a Growth or Branching without a mask_token")
    return HeadTree(head, shape, learner)


def tapped(config: EagleConfig, target: Any) -> Any:
    """The target (a `Llama` or `Qwen`) with the taps that the head reads.

    Raises:
        ValueError: for a target of another vocabulary or hidden size, or with other layers than are read.
    """
    layers = target.config.num_layers
    for name in ("vocab_size", "hidden_size"):
        want, got = getattr(config, name), getattr(target.config, name)
        require(want == got, "target", f"one of {name} {got}", f"one of {want}")
    require(max(config.taps) <= layers, "target", f"one of {layers} layers", f"one of at least {max(config.taps)}")
    if config.inputs == "fused":
        require(config.taps == (layers,), "taps", config.taps, f"the target's last layer alone, {(layers,)}")
    return dataclasses.replace(target, taps=config.taps)


def chain(k: int, ranking: Literal["point", "coupled"] = "coupled") -> Growth:
    """k steps of one token each, k + 1 nodes; verify with `match`."""
    return Growth(nodes=k + 1, depth=k, width=1, children=1, ranking=ranking)


def dynamic_tree(
    nodes: int = 60, depth: int = 8, width: int = 10, ranking: Literal["point", "coupled"] = "point"
) -> Growth:
    """EAGLE-2's tree as its authors run it: 7 passes behind the root's, 10 nodes wide, 59 tokens kept."""
    return Growth(nodes=nodes, depth=depth, width=width, children=width, candidates=max(64, width), ranking=ranking)
