"""A target from a path: GGUF file, Hugging Face directory, or the name of the default model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from spec_jax.models import layers, lazy, linear, llama, orbax_weights, partition, placement, qwen_tensors
from spec_jax.models.checkpoint import Checkpoint, CheckpointError, LazyTensor, required_tensors
from spec_jax.models.config import LlamaConfig
from spec_jax.models.gguf import load_gguf
from spec_jax.models.huggingface import load_description, load_huggingface
from spec_jax.models.llama import Llama, LlamaParams
from spec_jax.models.qwen import Qwen, QwenParams
from spec_jax.models.qwen_config import QwenConfig
from spec_jax.models.smollm2 import smollm2_path
from spec_jax.models.tokenizer import Tokenizer

_NAMES = {"smollm2": smollm2_path, "small_hybrid": lambda: Path(__file__).with_name("small_hybrid")}


@dataclasses.dataclass(frozen=True)
class LoadedTarget:
    """A target, its parameters, and what else its checkpoint says."""

    target: Llama | Qwen
    params: LlamaParams | QwenParams
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    max_position_embeddings: int


def load_target(
    path: str | Path,
    dtype: Any = jnp.float32,
    stacked: bool | None = None,
    mesh: Mesh | None = None,
    transposed: bool | None = None,
) -> LoadedTarget:
    """Load a model: "smollm2", "small_hybrid", a .gguf file (Llama family), or a directory with config and weights.

    The small hybrid is a Qwen3-Next of a few million parameters, trained on Python's standard library; its card stands
    beside its weights in spec_jax/models/small_hybrid.

    A directory's family is its config's model_type: llama, mistral, gemma3_text, or one of
    `qwen_config.MODEL_TYPES`. Its weights are safetensors, or what `orbax_weights.save_orbax` wrote.

    stacked: layers of a kind in one array each and scanned, so that compile time does not grow with depth, or one after
    another in a tuple, which views (`models.views`) need. None: stacked on every backend but CPU, where a scan copies
    each layer's weights before use; orbax weights as they were saved.

    transposed: embedding and dense kernels stored [out, in], by which a CPU multiplies a few rows faster. None: on CPU,
    for layers in a tuple and without a mesh.

    mesh: split the parameters over its devices (`partition.param_specs`). Each process reads what its own devices hold,
    a device's part of an array at a time, so no host has to hold the model. (A tensor of a .gguf file is read whole.)

    Raises:
        CheckpointError: for a path that is neither, or a checkpoint that is damaged or of another family.
        ValueError: for transposed kernels in stacked layers or on a mesh.
    """
    place = model_path(path)
    if place.is_dir() and orbax_weights.saved_here(place):
        return _saved(place, dtype, stacked, mesh, transposed)
    if place.is_dir():
        checkpoint = load_huggingface(place)
    elif place.is_file():
        checkpoint = load_gguf(place)
    else:
        raise CheckpointError(
            f"{path}: no such file or directory; takes {', '.join(_NAMES)}, a .gguf file or a model directory"
        )
    stack = jax.default_backend() != "cpu" and not transposed if stacked is None else stacked
    target = _target(checkpoint, mesh)
    turn = _transpose(transposed, stack, mesh)
    tree = _lazy(checkpoint.config, checkpoint.tensors, dtype, stack)
    if turn:
        tree = linear.transposed(tree, lazy.transpose)
    if mesh is None:
        return _loaded(target, lazy.whole(tree), checkpoint)
    places = _shardings(mesh, target, lazy.shapes(tree))
    return _loaded(target, jax.tree.map(lazy.place, tree, places), checkpoint)


def model_path(path: str | Path) -> Path:
    """Where the model is that `load_target` loads."""
    return _NAMES[str(path)]() if str(path) in _NAMES else Path(path)


def abstract_params(
    config: LlamaConfig | QwenConfig, dtype: Any = jnp.float32, stacked: bool = False
) -> LlamaParams | QwenParams:
    """The parameters of a model that is nowhere, as ShapeDtypeStructs: those that `load_target` would make of them."""

    def absent() -> Any:
        raise ValueError("these parameters have no values")

    kind = np.dtype(np.float32)
    tensors = {name: LazyTensor(shape, kind, absent) for name, shape in required_tensors(config).items()}
    return lazy.shapes(_lazy(config, tensors, dtype, stacked))


def _transpose(asked: bool | None, stacked: bool, mesh: Mesh | None) -> bool:
    able = not stacked and mesh is None
    if asked and not able:
        raise ValueError("transposed: got True with stacked layers or a mesh, takes it with neither")
    return able and jax.default_backend() == "cpu" if asked is None else asked


def _saved(place: Path, dtype: Any, stacked: bool | None, mesh: Mesh | None, transposed: bool | None) -> LoadedTarget:
    checkpoint, found = load_description(place), orbax_weights.fields(place)
    form = isinstance(found.get("layers"), dict)
    if stacked is not None and stacked != form:
        names = {True: "stacked", False: "one after another"}
        raise ValueError(f"stacked: got {stacked}, takes {form} or None: {place} has its layers {names[form]}")
    turn = _transpose(transposed, form, mesh)
    if isinstance(checkpoint.config, QwenConfig):
        mtp = found.get("mtp") is not None
        checkpoint = dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, mtp=mtp))
    target = _target(checkpoint, mesh)
    like = abstract_params(checkpoint.config, dtype, form)
    one = SingleDeviceSharding(jax.devices()[0])
    places = jax.tree.map(lambda _: one, like) if mesh is None else _shardings(mesh, target, like)
    put = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)  # noqa: E731
    params = orbax_weights.restore(place, jax.tree.map(put, like, places))
    return _loaded(target, linear.transposed(params, jnp.transpose) if turn else params, checkpoint)


def _target(checkpoint: Checkpoint, mesh: Mesh | None) -> Llama | Qwen:
    config = checkpoint.config
    target = Qwen(config) if isinstance(config, QwenConfig) else Llama(config)
    return target if mesh is None else dataclasses.replace(target, mesh=mesh)


def _lazy(config: LlamaConfig | QwenConfig, tensors: Mapping[str, Any], dtype: Any, stacked: bool) -> Any:
    """The parameters as a tree of `Lazy` arrays."""
    if isinstance(config, QwenConfig):
        tree, period = qwen_tensors.lazy_params(config, tensors, dtype), config.period
    else:
        tree, period = llama.lazy_params(config, tensors, dtype), 1
    assert isinstance(tree.layers, tuple)
    return dataclasses.replace(tree, layers=layers.stack(tree.layers, period, lazy.stack)) if stacked else tree


def _shardings(mesh: Mesh, target: Llama | Qwen, shapes: Any) -> Any:
    return placement.shardings(mesh, partition.param_specs(target, shapes, mesh))


def _loaded(target: Llama | Qwen, params: Any, checkpoint: Checkpoint) -> LoadedTarget:
    tokenizer, eos = checkpoint.tokenizer, checkpoint.eos_token_ids
    return LoadedTarget(target, params, tokenizer, eos, checkpoint.config.max_position_embeddings)
