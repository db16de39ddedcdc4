"""The target's first layers and a trained one behind them as its drafter (Kangaroo, EESD; after their abstracts)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from spec_jax.drafters import own_files
from spec_jax.drafters.model_tree import ModelTree
from spec_jax.drafters.named import reading_config
from spec_jax.models.config import LlamaConfig, is_size, require
from spec_jax.models.layers import unstack
from spec_jax.models.linear import straight
from spec_jax.models.llama import Llama
from spec_jax.models.qwen import Qwen
from spec_jax.models.qwen_config import QwenConfig
from spec_jax.topology.branching import Branching
from spec_jax.topology.coupling import Learner
from spec_jax.topology.growth import Growth

FORMAT = "spec_jax.early_exit"


@dataclasses.dataclass(frozen=True)
class EarlyExitConfig:
    """An early exit with an adapter. Raises ValueError, naming the field, for anything that does not fit.

    The drafter keeps a cache of its own; Kangaroo shares the target's for the layers that are the target's.

    Attributes:
        model: the target's config.
        layers: how many of the target's layers, the first ones, stay as they are.
        adapter: the target's layer whose kind the trained one has, and whose weights it begins with; its input is the
            hidden state behind `layers`. Behind it stand a trained final norm and the target's map to logits.
        depth: tokens of a draft that it was trained for.
    """

    model: LlamaConfig | QwenConfig
    layers: int
    adapter: int
    depth: int = 4

    def __post_init__(self) -> None:
        """Check every field."""
        count = self.model.num_layers
        require(is_size(self.layers) and self.layers < count, "layers", self.layers, f"1 .. {count - 1}")
        inside = isinstance(self.adapter, int) and self.layers <= self.adapter < count
        require(inside, "adapter", self.adapter, f"{self.layers} .. {count - 1}, a layer that is left out")
        require(is_size(self.depth), "depth", self.depth, "a positive integer")

    def view(self) -> Llama | Qwen:
        """The drafter's model."""
        config = self.model.with_layers([*range(self.layers), self.adapter])
        return Qwen(config) if isinstance(config, QwenConfig) else Llama(config)


@flax.struct.dataclass
class EarlyExitParams:
    """What is trained: a decoder layer and the norm behind it."""

    layer: Any
    norm: Float[Array, "hidden"]

    def over(self, config: EarlyExitConfig, target_params: Any) -> Any:
        """The parameters of `config.view()`: the target's own arrays but for these."""
        layers = (*unstack(target_params.layers)[: config.layers], self.layer)
        return dataclasses.replace(target_params, layers=layers, norm=self.norm)


def init_params(config: EarlyExitConfig, target_params: Any) -> EarlyExitParams:
    """The target's own layer and norm."""
    return EarlyExitParams(straight(unstack(target_params.layers)[config.adapter]), target_params.norm)


def of(params: Any) -> EarlyExitParams:
    """What is trained of the parameters of `config.view()`."""
    return EarlyExitParams(params.layers[-1], params.norm)


def drafter(config: EarlyExitConfig, shape: Growth | Branching, learner: Learner | None = None) -> ModelTree:
    """A drafter for the target; its parameters are those of `EarlyExitParams.over`."""
    return ModelTree(config.view(), shape, learner or Learner())


def save(
    directory: str | Path, config: EarlyExitConfig, params: EarlyExitParams, target: str, dtype: Any = None
) -> None:
    """Write what is trained, and nothing of the target, which `target` names."""
    network = {name: getattr(config, name) for name in ("layers", "adapter", "depth")}
    own_files.save(directory, FORMAT, {"network": network}, params, dtype, target)


def from_tensors(
    source: str | Path,
    fields: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    target: Any,
    target_params: Any,
    dtype: Any = jnp.float32,
) -> tuple[EarlyExitConfig, Any]:
    """What `save` wrote, over a target (a `Llama` or `Qwen`) and its parameters. CheckpointError for anything else."""
    with reading_config(source):
        own_files.check_fields(fields, "network")
        network = fields.get("network")
        if not isinstance(network, Mapping):
            raise ValueError(f"network: got {network!r}, takes layers, adapter and depth")
        config = EarlyExitConfig(target.config, **own_files.tuples(network))
    template = jax.eval_shape(lambda params: init_params(config, params), target_params)
    return config, own_files.read(source, tensors, template, dtype).over(config, target_params)
