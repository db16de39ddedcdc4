"""MTP heads in directories: inside their target's own checkpoint, in the speculators format (mtp), and in ours.

Inside a checkpoint the head is its mtp.* tensors. Embedding and map to logits are the target's in every form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from spec_jax.drafters import mtp, own_files
from spec_jax.drafters.eagle.published import is_eagle
from spec_jax.drafters.files import architecture, check_names, write_directory
from spec_jax.drafters.known import check_speculator
from spec_jax.drafters.named import reading_config
from spec_jax.models import lazy, linear, qwen_tensors
from spec_jax.models.checkpoint import CheckpointError
from spec_jax.models.fields import object_of, require_only
from spec_jax.models.huggingface import load_huggingface
from spec_jax.models.load import abstract_params
from spec_jax.models.qwen import Mtp, Qwen, QwenParams
from spec_jax.models.qwen_config import MODEL_TYPES, QwenConfig
from spec_jax.models.qwen_shapes import MTP_LAYER, mtp_tensors

FORMAT, SPECULATORS = "spec_jax.mtp", "mtp"
STEPS = 3
"""How often a head of a checkpoint is used for a draft, which does not say it (FastMTP's, arXiv 2509.18362)."""

_NAMES = {
    "mtp.fc.": "mtp_layers.0.input_proj.",
    "mtp.norm.": "mtp_layers.0.final_layernorm.",
    "mtp.pre_fc_norm_hidden.": "mtp_layers.0.hidden_layernorm.",
    "mtp.pre_fc_norm_embedding.": "mtp_layers.0.token_layernorm.",
    f"{MTP_LAYER}.": "mtp_layers.0.",
}
_UNFILLED = "verifier_lm_head.weight"
"""The package's converter writes this one without having filled it; nothing reads it."""
_FREE = ("mtp", "tie_word_embeddings", "max_position_embeddings")


def is_checkpoint(fields: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a whole model which may have such a head, and not of a drafter."""
    whole = (architecture(fields) or "").endswith(("ForCausalLM", "ForConditionalGeneration"))
    return whole and fields.get("model_type") in MODEL_TYPES and not is_eagle(fields)


def from_checkpoint(
    source: str | Path, target: Any, target_params: Any, dtype: Any = jnp.float32
) -> tuple[Qwen, QwenParams]:
    """The head of a model's directory, over a target of the same sizes and its parameters; no other tensor is read.

    Returns the target, as one that has a head, and the drafter's parameters (see `mtp.params`).

    Raises CheckpointError for what `load_huggingface` refuses (tensors that are missing, unexpected or misshapen, all
    named), a model without mtp.* tensors, or one of other sizes than the target, which are named.
    """
    checkpoint = load_huggingface(source)
    config = checkpoint.config
    if not isinstance(config, QwenConfig) or not config.mtp:
        raise CheckpointError(f"{source}: holds no mtp.* tensors: a model without an MTP head, which is no drafter")
    made = _checked(source, config, target)
    return made, _over(target_params, _read(made.config, checkpoint.tensors, dtype))


def from_speculators(
    source: str | Path,
    fields: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    target: Any,
    target_params: Any,
    dtype: Any = jnp.float32,
) -> tuple[Qwen, QwenParams]:
    """The same of a head in the speculators format."""
    with reading_config(source):
        check_speculator(fields, "MTP", ("num_nextn_predict_layers",))
        require_only(fields, ("num_nextn_predict_layers", 1, (1,)))
        config = QwenConfig.from_hf(object_of(fields, "transformer_layer_config"))
    made = _checked(source, config, target)
    own = {_inside(name): x for name, x in tensors.items() if name != _UNFILLED}
    wanted = {_outside(name): shape for name, shape in mtp_tensors(made.config, own).items()}
    check_names(source, {name: x for name, x in tensors.items() if name != _UNFILLED}, wanted)
    return made, _over(target_params, _read(made.config, own, dtype))


def from_tensors(
    source: str | Path,
    fields: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    target: Any,
    target_params: Any,
    dtype: Any = jnp.float32,
) -> tuple[Qwen, QwenParams, int]:
    """The same of what `save` wrote, and how many steps it was trained for."""
    with reading_config(source):
        own_files.check_fields(fields, "network", "steps")
        network, steps = fields.get("network"), fields.get("steps")
        if not isinstance(network, Mapping) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"network, steps: got {network!r} and {steps!r}, takes sizes and a number of tokens")
        config = own_files.config(QwenConfig, network)
    made = _checked(source, config, target)
    whole = abstract_params(made.config, dtype)
    assert isinstance(whole, QwenParams)
    head = own_files.read(source, tensors, whole.mtp, dtype=None)
    return made, _over(target_params, head), steps


def save(
    directory: str | Path,
    config: QwenConfig,
    params: QwenParams,
    target: str,
    dtype: Any = None,
    steps: int = STEPS,
) -> None:
    """Write the head of a target's (or `mtp.params`'s) parameters in our format, and nothing else of the target.

    config: the target's. target: its name. dtype: see `own_files.save`. steps: tokens that it was trained to draft.
    """
    fields = {"network": dataclasses.asdict(config), "steps": steps}
    own_files.save(directory, FORMAT, fields, _head(params), dtype, target)


def save_speculators(
    directory: str | Path, config: QwenConfig, params: QwenParams, target: Mapping[str, Any], steps: int = STEPS
) -> None:
    """The same in the speculators format; `target` has the target's name_or_path and architectures.

    Raises ValueError for a target that is no qwen3_next.
    """
    no_words = jnp.zeros((config.hidden_size, 0))
    alone = dataclasses.replace(params, embedding=no_words, layers=(), head=None, mtp=_head(params))
    tensors = qwen_tensors.to_tensors(config, alone)
    fields = {
        "speculators_model_type": SPECULATORS,
        "speculators_version": "0.9.0",
        "architectures": ["MTPDraftModel"],
        "transformer_layer_config": config.to_hf(),
        "num_nextn_predict_layers": 1,
        "speculators_config": {
            "algorithm": SPECULATORS,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": steps}],
            "default_proposal_method": "greedy",
            "verifier": dict(target),
        },
    }
    write_directory(directory, fields, {_outside(n): x for n, x in tensors.items() if n.startswith("mtp.")})


def _head(params: QwenParams) -> Mtp:
    head = mtp.params(params).mtp
    assert head is not None
    return head


def _checked(source: str | Path, config: QwenConfig, target: Any) -> Qwen:
    """The target as one with an MTP head; CheckpointError for a head of another one."""
    if not isinstance(target, Qwen):
        raise CheckpointError(f"{source}: an MTP head of a Qwen model; the target is a {type(target).__name__}")
    names = [f.name for f in dataclasses.fields(QwenConfig) if f.name not in _FREE]
    pairs = [(name, getattr(config, name), getattr(target.config, name)) for name in names]
    if apart := [f"{name} {got}, not {want}" for name, got, want in pairs if got != want]:
        raise CheckpointError(f"{source}: made for another target: {', '.join(apart)}")
    return dataclasses.replace(target, config=dataclasses.replace(target.config, mtp=True))


def _read(config: QwenConfig, tensors: Mapping[str, Any], dtype: Any) -> Mtp:
    return lazy.whole(qwen_tensors.lazy_mtp(config, tensors, dtype))


def _over(target_params: QwenParams, head: Mtp) -> QwenParams:
    """The drafter's parameters with another head, whose kernels are stored as the target's."""
    if isinstance(target_params.embedding, linear.RowEmbedding):
        head = linear.turned(head, jnp.transpose)
    return mtp.params(dataclasses.replace(target_params, mtp=head))


def _outside(name: str) -> str:
    """A tensor's name in the speculators format, by its name inside a checkpoint."""
    return _renamed(name, _NAMES)


def _inside(name: str) -> str:
    return _renamed(name, {theirs: ours for ours, theirs in _NAMES.items()})


def _renamed(name: str, names: Mapping[str, str]) -> str:
    return next((new + name.removeprefix(old) for old, new in names.items() if name.startswith(old)), name)
