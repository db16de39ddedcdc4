"""Training forwards of heads on the target's last hidden state alone: Medusa, Hydra, MLP speculator, ReDrafter."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.platform import split_by_compiler
from spec_jax.drafters import medusa, medusa_files, mlp_speculator, mlp_speculator_files, recurrent, recurrent_files
from spec_jax.drafters.block.ends import ends_of
from spec_jax.drafters.medusa import MedusaConfig, MedusaParams
from spec_jax.drafters.mlp_speculator import MlpConfig, MlpParams
from spec_jax.drafters.recurrent import RecurrentConfig, RecurrentParams
from spec_jax.topology.growth import Growth
from spec_jax.train.block import fixed_ends
from spec_jax.train.slots import Said
from spec_jax.train.task import Asked


@dataclasses.dataclass(frozen=True)
class _LastHidden:
    """What these have in common as a `Trainable`; what is trained are a head's parameters without the target's ends.

    `layer` is the target's last one. A kind names the module that has its functions, and the class of its parameters.
    """

    config: Any
    layer: int
    made: ClassVar[ModuleType]
    params: ClassVar[type]

    @property
    def slots(self) -> int:
        """Tokens behind an anchor."""
        raise NotImplementedError

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's last layer."""
        return (self.layer,)

    def __call__(self, params: Any, asked: Asked) -> Said:
        """See Forward."""
        whole, features = self.as_drafter(params, asked.target), asked.features[:, :, :1]
        given = (features, asked.tokens, asked.anchors, asked.blocks)
        with split_by_compiler(True):  # kernels have no gradient, what the compiler makes has
            return Said(self.made.text_logits(self.config, whole, *given))

    def init(self, key: Array, target_params: Any, kept: Any = None) -> Any:
        """As the network begins."""
        return jax.tree.map(jnp.copy, self.trained(self.made.init_params(self.config, key, ends_of(target_params))))

    def as_drafter(self, trained: Any, target_params: Any, shared: Any = None) -> Any:
        """The parameters as the drafter takes them."""
        return self.params(**trained, ends=fixed_ends(target_params))

    def trained(self, params: Any) -> dict[str, Any]:
        """What is trained of a drafter's parameters."""
        return medusa.own_parts(params)

    def drafter(self, shape: Growth) -> Any:
        """The drafter with drafts of a shape."""
        return self.made.drafter(self.config, shape)

    def tapped(self, target: Any) -> Any:
        """The target with its last layer tapped."""
        return medusa.tapped(self.config, target)


@dataclasses.dataclass(frozen=True)
class MedusaForward(_LastHidden):
    """Medusa's and Hydra's heads as a `Trainable`."""

    config: MedusaConfig
    made = medusa
    params = MedusaParams

    @property
    def slots(self) -> int:
        """As many as there are heads."""
        return self.config.num_heads

    def save(self, directory: str | Path, params: Any, target: str, dtype: Any = None) -> None:
        """Write what `load_drafter` reads."""
        medusa_files.save(directory, self.config, params, target, dtype)


@dataclasses.dataclass(frozen=True)
class MlpForward(_LastHidden):
    """The MLP speculator (arXiv 2404.19124) as a `Trainable`: given the right token before each stage's own."""

    config: MlpConfig
    made = mlp_speculator
    params = MlpParams

    @property
    def slots(self) -> int:
        """As many as there are stages."""
        return self.config.num_stages

    def save(self, directory: str | Path, params: Any, target: str, dtype: Any = None) -> None:
        """Write what `load_drafter` reads."""
        mlp_speculator_files.save(directory, self.config, params, target, dtype)


@dataclasses.dataclass(frozen=True)
class RecurrentForward(_LastHidden):
    """ReDrafter's head (arXiv 2403.09919) as a `Trainable`: given the right tokens before each of `steps` slots."""

    config: RecurrentConfig
    steps: int = 5
    made = recurrent
    params = RecurrentParams

    def __post_init__(self) -> None:
        """Check the steps."""
        if self.steps < 1:
            raise ValueError(f"steps: got {self.steps}, takes 1 or more")

    @property
    def slots(self) -> int:
        """The steps."""
        return self.steps

    def save(self, directory: str | Path, params: Any, target: str, dtype: Any = None) -> None:
        """Write what `load_drafter` reads."""
        recurrent_files.save(directory, self.config, params, target, dtype, self.steps)
