"""The block-parallel family's training forward: what is trained, and what it says behind anchors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy.typing as npt
from jax import lax
from jaxtyping import Array

from spec_jax.drafters.block import native
from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.drafter import BlockDrafter
from spec_jax.drafters.block.ends import Ends, ends_of
from spec_jax.drafters.block.expander import teacher_logits
from spec_jax.drafters.block.heads.bigram import Bigram, BigramParams
from spec_jax.drafters.block.heads.head import PLAIN, Head, Plain
from spec_jax.drafters.block.heads.markov import Markov, MarkovParams
from spec_jax.drafters.block.network import BlockParams, Network, init_network
from spec_jax.drafters.block.text import text_blocks
from spec_jax.models.linear import Linear
from spec_jax.topology.growth import Growth
from spec_jax.train.slots import Said
from spec_jax.train.task import Asked

KEPT = "kept"
"""The name under which `Batch.shared` holds a reduced vocabulary's target ids."""

TABLE = "table"
"""The name under which it holds the n-gram table of a head that is counted (`Bigram`)."""


@flax.struct.dataclass
class Trained:
    """What of a block drafter is trained; the target's embedding, norm and head are not, nor is an n-gram table."""

    network: Network
    head: Any = None
    lm_head: Linear | None = None


@dataclasses.dataclass(frozen=True)
class BlockForward:
    """DFlash and its family as a `task.Forward`; a head is given the true tokens before each slot.

    An n-gram table (DART) has no part in training: the network learns alone, the table is counted (`counted`).
    """

    config: BlockConfig
    head: Head = Plain()

    @property
    def slots(self) -> int:
        """The tokens that a block predicts."""
        return self.config.depth

    @property
    def taps(self) -> tuple[int, ...]:
        """Those of the network; for a head that reads the last hidden state, `BlockDrafter.tapped` adds it."""
        return self.config.taps

    def __call__(self, params: Trained, asked: Asked) -> Said:
        """See Forward."""
        whole = drafter_params(params, asked.target, asked.shared)
        features = asked.features[:, :, : len(self.taps) + self.head.final_tap]
        kept = asked.carried
        if kept is not None:
            kept = dataclasses.replace(kept, features=kept.features[:, :, : len(self.taps)])
        head = PLAIN if self.is_counted else self.head.uncut
        found = text_blocks(self.config, whole, features, asked.tokens, asked.anchors, head, kept)
        rows = found.block.normed.reshape(*asked.anchors.shape, *found.block.normed.shape[1:])
        rows = rows if self.config.rejected is not None else None
        if isinstance(head, Plain):
            return Said(found.logits, rows=rows)
        anchor = jnp.take_along_axis(asked.tokens, asked.anchors, axis=1)[..., None]
        before = jnp.concatenate([anchor, asked.blocks[..., :-1]], axis=-1)
        flat = before.reshape(-1, before.shape[-1])
        logits = teacher_logits(head, whole, found.block, flat).reshape(found.logits.shape)
        confidence = None
        if isinstance(head, Markov) and head.confidence is not None:
            own = head.confidence_logits(whole, found.block, flat)
            confidence = None if own is None else own.reshape(before.shape)
        return Said(logits, found.base, confidence, rows=rows)

    def as_drafter(self, trained: Trained, target_params: Any, shared: Any = None) -> BlockParams:
        """The parameters as the drafter takes them; ValueError for a head that is counted, without its table."""
        if self.is_counted and (shared is None or TABLE not in shared):
            raise ValueError(f"shared: got no n-gram table, takes one as {TABLE!r} with the head Bigram")
        return drafter_params(trained, target_params, shared)

    def trained(self, params: BlockParams) -> Trained:
        """What is trained of a drafter's parameters."""
        own = self.config.draft_vocab_size is not None and self.config.own_head
        return Trained(params.network, None if self.is_counted else params.head, params.lm_head if own else None)

    @property
    def is_counted(self) -> bool:
        """Whether the head is a table of n-grams."""
        return isinstance(self.head, Bigram)

    def counted(self, texts: Iterable[npt.ArrayLike]) -> BigramParams | None:
        """The n-gram table of texts, for `Batch.shared`; None for a head that has none."""
        return self.head.counted_in(texts, self.config) if isinstance(self.head, Bigram) else None

    def drafter(self, shape: Growth) -> BlockDrafter:
        """The drafter with drafts of a shape."""
        return BlockDrafter(self.config, shape, self.head)

    def tapped(self, target: Any) -> Any:
        """The target with the taps that are read."""
        shape = Growth(nodes=2, depth=1, width=1, children=1)
        return self.drafter(shape).tapped(target)

    def save(self, directory: str | Path, params: BlockParams, target: str, dtype: Any = None) -> None:
        """Write what `load_drafter` reads; a map to logits that is the target's is left out."""
        native.save_native(directory, self.config, self.head, params, dtype, target)

    def init(self, key: Array, target_params: Any, kept: Any = None) -> Trained:
        """Random parameters; a reduced vocabulary's own head begins as the target's columns for its tokens."""
        network_key, head_key = jax.random.split(key)
        lm_head = None
        if self.config.draft_vocab_size is not None:
            if kept is None:
                raise ValueError("kept: got None, takes the draft vocabulary's token ids")
            lm_head = ends_of(target_params).columns(jnp.asarray(kept)) if self.config.own_head else None
        head = None if self.is_counted else self.head.init(self.config, head_key)
        return Trained(init_network(self.config, network_key), head, lm_head)


def drafter_params(trained: Trained, target_params: Any, shared: Any = None) -> BlockParams:
    """The parameters as `BlockDrafter` takes them: the trained ones, and the target's ends as they are.

    A confidence head's temperatures are set by calibration, not trained.
    """
    head = trained.head if shared is None else shared.get(TABLE, trained.head)
    if isinstance(head, MarkovParams) and head.temperature is not None:
        head = dataclasses.replace(head, temperature=lax.stop_gradient(head.temperature))
    kept = None if shared is None else shared.get(KEPT)
    ends = fixed_ends(target_params)
    return BlockParams(trained.network, ends, head, ends.drafted(trained.lm_head, kept), kept)


def fixed_ends(target_params: Any) -> Ends:
    """The target's ends, which no gradient reaches."""
    return jax.tree.map(lax.stop_gradient, ends_of(target_params))
