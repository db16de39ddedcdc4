"""The training forward of an early exit's adapter: the drafter's model along the right tokens behind each anchor."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.platform import split_by_compiler
from spec_jax.drafters import early_exit
from spec_jax.drafters.early_exit import EarlyExitConfig, EarlyExitParams
from spec_jax.drafters.model_tree import ModelTree
from spec_jax.topology.growth import Growth
from spec_jax.train import branches
from spec_jax.train.slots import Said
from spec_jax.train.task import Asked


@dataclasses.dataclass(frozen=True)
class EarlyExitForward:
    """An adapter behind the target's first layers as a `Trainable`; the target's arrays get no gradient."""

    config: EarlyExitConfig
    taps: tuple[int, ...] = dataclasses.field(default=(), init=False)

    @property
    def slots(self) -> int:
        """The tokens that it drafts."""
        return self.config.depth

    def __call__(self, params: EarlyExitParams, asked: Asked) -> Said:
        """See Forward."""
        whole = self.as_drafter(params, asked.target)
        with split_by_compiler(True):  # kernels have no gradient, what the compiler makes has
            found = branches.read(self.config.view(), whole, asked.tokens, asked.anchors, asked.blocks)
        return Said(found.logits)

    def init(self, key: Array, target_params: Any, kept: Any = None) -> EarlyExitParams:
        """A copy of the target's own layer and norm."""
        return jax.tree.map(jnp.copy, early_exit.init_params(self.config, target_params))

    def as_drafter(self, trained: EarlyExitParams, target_params: Any, shared: Any = None) -> Any:
        """The parameters as the drafter takes them."""
        return trained.over(self.config, jax.tree.map(lax.stop_gradient, target_params))

    def trained(self, params: Any) -> EarlyExitParams:
        """What is trained of a drafter's parameters."""
        return early_exit.of(params)

    def drafter(self, shape: Growth) -> ModelTree:
        """The drafter with drafts of a shape."""
        return early_exit.drafter(self.config, shape)

    def tapped(self, target: Any) -> Any:
        """The target as it is: nothing is tapped."""
        return target

    def save(self, directory: str | Path, params: Any, target: str, dtype: Any = None) -> None:
        """Write what `load_drafter` reads."""
        early_exit.save(directory, self.config, early_exit.of(params), target, dtype)
