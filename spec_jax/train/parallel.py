"""PARD's training forward (arXiv 2504.18583): a text and masks behind its anchors, packed into one pass."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.platform import split_by_compiler
from spec_jax.drafters import parallel_files, parallel_model
from spec_jax.drafters.parallel_model import ParallelConfig, ParallelModel
from spec_jax.models.layers import unstack
from spec_jax.models.linear import straight
from spec_jax.models.load import abstract_params, load_target
from spec_jax.topology.growth import Growth
from spec_jax.train import unroll
from spec_jax.train.slots import Said
from spec_jax.train.task import Asked
from spec_jax.tree import Tree


@dataclasses.dataclass(frozen=True)
class ParallelForward:
    """A model that drafts over masks as a `Trainable`; all of it is trained.

    One pass over the text's tokens and, behind every anchor, a chain of masks, each at its own position: a mask sees
    the text up to the anchor and the masks of its chain, as when it drafts. The paper drops rows conditionally: of the
    d-th masks only a part max(rate^d, floor) is kept, and only behind masks that are kept. (The paper keeps rows of the
    whole text; here the text's anchors are what is kept of depth 0, as for every drafter.)

    Attributes:
        config: the model, its mask, and how many tokens it drafts.
        rate, floor: of the rows that are kept (published: 0.7 and 0.2); a rate of 1 keeps all.
        begin: the model whose weights it starts from, as `load_target` takes it; None: the target's first layers, for
            a config made of these.
    """

    config: ParallelConfig
    rate: float = 0.7
    floor: float = 0.2
    begin: str | None = None
    taps: tuple[int, ...] = dataclasses.field(default=(), init=False)

    def __post_init__(self) -> None:
        """Check rate and floor."""
        unroll.kept_rows(1, 1, self.rate, self.floor)

    @property
    def slots(self) -> int:
        """The tokens that it drafts."""
        return self.config.depth

    def __call__(self, params: Any, asked: Asked) -> Said:
        """See Forward. The logits of slots that were dropped are zeros."""
        b, r = asked.anchors.shape
        counts = unroll.kept_rows(r, self.slots, self.rate, self.floor)
        keys = jax.random.split(asked.key, b)
        order = jax.vmap(unroll.conditional_drop)(keys, asked.real)
        tree, at = _packed(asked.tokens, asked.anchors, order, counts, self.config.mask_token)
        model: Any = self.config.target(taps=(self.config.model.num_layers,))
        with split_by_compiler(True):  # kernels have no gradient, what the compiler makes has
            output, _, _ = model.score(params, model.init_state(params, b, tree.tokens.shape[1]), tree)
        rows = jax.vmap(lambda x, at: x[at.reshape(-1)])(output.features[:, :, 0], at)
        logits = model.logits(params, rows).reshape(b, r, self.slots, -1)
        return Said(jnp.where(at[..., None] < 0, 0.0, logits), kept=at >= 0)

    def init(self, key: Array, target_params: Any, kept: Any = None) -> Any:
        """The parameters of `begin`, or copies of the target's embedding, first layers, norm and head."""
        if self.begin is not None:
            return load_target(self.begin, stacked=False, transposed=False).params
        c = self.config.model
        layers = unstack(target_params.layers)
        own = dataclasses.replace(target_params, layers=layers[: c.num_layers])
        own = dataclasses.replace(own, mtp=None) if hasattr(own, "mtp") else own
        own = straight(own)
        shapes = lambda tree: [x.shape for x in jax.tree.leaves(tree)]  # noqa: E731
        if shapes(own) != shapes(abstract_params(c)):
            raise ValueError("config: got another model than the target's first layers, takes these without a `begin`")
        return jax.tree.map(jnp.copy, own)

    def as_drafter(self, trained: Any, target_params: Any, shared: Any = None) -> Any:
        """The model's parameters."""
        return trained

    def trained(self, params: Any) -> Any:
        """All of them."""
        return params

    def drafter(self, shape: Growth) -> ParallelModel:
        """The drafter with drafts of a shape."""
        return parallel_model.drafter(self.config, shape)

    def tapped(self, target: Any) -> Any:
        """The target as it is: nothing of it is read."""
        return target

    def save(self, directory: str | Path, params: Any, target: str, dtype: Any = None) -> None:
        """Write what `load_drafter` reads."""
        parallel_files.save(directory, self.config, params, target, dtype)


def first_layers(target: Any, layers: int) -> Any:
    """The config of a target's first layers; ValueError for more than it has."""
    if not 0 < layers <= target.num_layers:
        raise ValueError(f"layers: got {layers}, takes 1 .. {target.num_layers}")
    config = target.with_layers(range(layers))
    return dataclasses.replace(config, mtp=False) if hasattr(config, "mtp") else config


def _packed(
    tokens: Int[Array, "b t"], anchors: Int[Array, "b r"], order: Int[Array, "b r"], counts: tuple[int, ...], mask: int
) -> tuple[Tree, Int[Array, "b r k"]]:
    """The text with masks behind, depth by depth, and the node whose logits each slot is for: -1 where it was dropped.

    The d-th masks (from 1) are those of the first counts[d] anchors in `order`.
    """
    b, t = tokens.shape
    rank = jnp.argsort(order, axis=1)
    above = jnp.take_along_axis(anchors, order, axis=1)
    parents, at, start = [jnp.broadcast_to(jnp.arange(-1, t - 1), (b, t))], [anchors], t
    for count in counts[1:]:
        parents.append(above[:, :count])
        above = jnp.broadcast_to(start + jnp.arange(count), (b, count))
        at.append(jnp.where(rank < count, start + rank, -1))
        start += count
    masks = jnp.full((b, start - t), mask, jnp.int32)
    whole = jnp.concatenate([tokens, masks], axis=1).astype(jnp.int32)
    parent = jnp.concatenate(parents, axis=1).astype(jnp.int32)
    return Tree(whole, parent, jnp.ones(whole.shape, bool)), jnp.stack(at, axis=2)
