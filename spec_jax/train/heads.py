"""Training forwards of heads with an attention of their own over the target's hidden states: EAGLE, P-EAGLE, MTP."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from spec_jax.drafters import mtp, mtp_files
from spec_jax.drafters.block.ends import ends_of
from spec_jax.drafters.depth_tree import DepthTree
from spec_jax.drafters.eagle import head as eagle
from spec_jax.drafters.eagle import network, weights
from spec_jax.drafters.eagle.config import EagleConfig
from spec_jax.drafters.eagle.network import EagleParams, Network
from spec_jax.drafters.eagle.text import text_steps
from spec_jax.drafters.head_tree import HeadTree
from spec_jax.models import mtp as heads
from spec_jax.models.linear import Linear
from spec_jax.models.qwen import Mtp, Qwen, QwenParams
from spec_jax.models.qwen_config import QwenConfig
from spec_jax.models.qwen_text import final_norm
from spec_jax.topology.growth import Growth
from spec_jax.train.block import KEPT, fixed_ends
from spec_jax.train.slots import Said
from spec_jax.train.task import Asked


@flax.struct.dataclass
class TrainedEagle:
    """What of an EAGLE head is trained: its network, and its own map to logits if it has one."""

    network: Network
    lm_head: Linear | None = None


@dataclasses.dataclass(frozen=True)
class EagleForward:
    """EAGLE-1, -2, -3 and P-EAGLE as a `Trainable`: training-time test (arXiv 2503.01840) over `slots` steps."""

    config: EagleConfig
    slots: int = 4

    @property
    def taps(self) -> tuple[int, ...]:
        """Those of the config."""
        return self.config.taps

    def __call__(self, params: TrainedEagle, asked: Asked) -> Said:
        """See Forward. The regression is EAGLE-1's: smooth L1 between own outputs and the target's hidden states."""
        whole = self.as_drafter(params, asked.target, asked.shared)
        features = asked.features[:, :, : len(self.taps)]
        found = text_steps(self.config, whole, features, asked.tokens, asked.anchors, asked.blocks)
        far = jnp.abs(found.outputs.astype(jnp.float32) - lax.stop_gradient(found.features))
        return Said(found.logits, regression=jnp.where(far < 1, far**2 / 2, far - 0.5).mean(-1))

    def init(self, key: Array, target_params: Any, kept: Any = None) -> TrainedEagle:
        """Random parameters; its own map to logits begins as the target's columns."""
        kept = None if kept is None else jnp.asarray(kept, jnp.int32)
        whole = network.init_params(self.config, key, ends_of(target_params), kept)
        return TrainedEagle(whole.network, whole.lm_head if self.config.own_head else None)

    def as_drafter(self, trained: TrainedEagle, target_params: Any, shared: Any = None) -> EagleParams:
        """The parameters as the drafter takes them."""
        kept, ends = None if shared is None else shared.get(KEPT), fixed_ends(target_params)
        return EagleParams(trained.network, ends, ends.drafted(trained.lm_head, kept), kept)

    def trained(self, params: EagleParams) -> TrainedEagle:
        """What is trained of a drafter's parameters."""
        return TrainedEagle(params.network, params.lm_head if self.config.own_head else None)

    def drafter(self, shape: Growth) -> HeadTree | DepthTree:
        """The drafter with drafts of a shape."""
        return eagle.drafter(self.config, shape)

    def tapped(self, target: Any) -> Any:
        """The target with the taps that are read."""
        return eagle.tapped(self.config, target)

    def save(self, directory: str | Path, params: EagleParams, target: str, dtype: Any = None) -> None:
        """Write what `load_drafter` reads; a map to logits that is the target's is left out."""
        about = {"name_or_path": target, "architectures": []}
        weights.save(directory, self.config, params, about, self.slots, dtype, copy_head=False)


@dataclasses.dataclass(frozen=True)
class MtpForward:
    """A target's own MTP head, used `slots` times on its own output (FastMTP, arXiv 2509.18362), as a `Trainable`.

    Every step is one causal pass over the text's pairs, its context the output of the step before.
    """

    config: QwenConfig
    slots: int = 2

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's last layer."""
        return (self.config.num_layers,)

    def __call__(self, params: Mtp, asked: Asked) -> Said:
        """See Forward. An anchor at position 0 has no pair: its logits are zeros."""
        target = dataclasses.replace(jax.tree.map(lax.stop_gradient, asked.target), mtp=params)
        context, outputs = final_norm(self.config, target, asked.features[:, :, 0]), []
        row = jnp.maximum(asked.anchors - 1, 0)[:, :, None]
        for step in range(self.slots):
            found, _ = heads.forward_text(self.config, target, context, jnp.roll(asked.tokens, -step - 1, axis=1))
            context = found.context
            outputs.append(jnp.take_along_axis(found.logits, row, axis=1))
        return Said(jnp.where((asked.anchors > 0)[..., None, None], jnp.stack(outputs, axis=2), 0.0))

    def init(self, key: Array, target_params: QwenParams, kept: Any = None) -> Mtp:
        """The head as the target has it; ValueError for a target without one."""
        if target_params.mtp is None:
            raise ValueError("target: got a model without an MTP head, takes one with mtp.* tensors")
        return jax.tree.map(jnp.copy, target_params.mtp)

    def as_drafter(self, trained: Mtp, target_params: QwenParams, shared: Any = None) -> QwenParams:
        """The parameters as the drafter takes them."""
        return mtp.params(dataclasses.replace(target_params, mtp=trained))

    def trained(self, params: QwenParams) -> Mtp | None:
        """What is trained of a drafter's parameters."""
        return params.mtp

    def drafter(self, shape: Growth) -> HeadTree:
        """The drafter with drafts of a shape."""
        return mtp.drafter(Qwen(self.config), shape)

    def tapped(self, target: Any) -> Any:
        """The target with its last layer tapped."""
        return mtp.tapped(target)

    def save(self, directory: str | Path, params: QwenParams, target: str, dtype: Any = None) -> None:
        """Write what `load_drafter` reads: the head, and nothing else of its target."""
        mtp_files.save(directory, self.config, params, target, dtype, self.slots)
