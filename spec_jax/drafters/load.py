"""A drafter from a local directory, over the target that it drafts for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from spec_jax.drafters import (
    early_exit,
    medusa,
    medusa_files,
    mlp_speculator,
    mlp_speculator_files,
    mtp,
    mtp_files,
    parallel_files,
    parallel_model,
    recurrent,
    recurrent_files,
)
from spec_jax.drafters.block import native, weights
from spec_jax.drafters.block.drafter import BlockDrafter, chain
from spec_jax.drafters.drafter import Drafter
from spec_jax.drafters.eagle import head as eagle
from spec_jax.drafters.eagle import published as eagle_published
from spec_jax.drafters.eagle import weights as eagle_weights
from spec_jax.drafters.files import read_fields, read_tensors
from spec_jax.drafters.parallel_model import ParallelConfig
from spec_jax.models.checkpoint import CheckpointError


@dataclasses.dataclass(frozen=True)
class LoadedDrafter:
    """A drafter, its parameters, and the target as the engine has to have it: with the taps that the drafter reads.

    parts are what `configs.build` takes of it: its network, and of a block drafter the head.
    """

    drafter: Drafter
    params: Any
    target: Any
    parts: dict[str, Any]


def load_drafter(path: str | Path, target: Any, shape: Any = None, dtype: Any = jnp.float32) -> LoadedDrafter:
    """Read a directory with config.json and safetensors in any known format; which one, its config says.

    Block drafters: DFlash and DFlash 2 (z-lab), DSpark, JetSpec, Domino, TreeFlash, speculators (dflash, dflash2,
    dspark, xpress), and what `block.native.save_native` writes. EAGLE heads: EAGLE-3 (SafeAILab, SGLang), EAGLE-1 and
    EAGLE-2 (SGLang), speculators (eagle3, peagle), and what `eagle.weights.save` writes. Medusa's heads, IBM's MLP
    speculators, and ours of Hydra (`medusa_files.save`) and ReDrafter (`recurrent_files.save`). PARD's models, and ours
    (`parallel_files.save`). Adapters behind an early exit (`early_exit.save`). MTP heads of Qwen3-Next
    and Qwen3.5: a checkpoint with mtp.* tensors, the target's own or a model's of the same sizes, speculators (mtp),
    and ours (`mtp_files.save`).

    Args:
        path: the directory.
        target: the target as `models.load.load_target` gives it: `.target` and `.params`.
        shape: the drafts, a `Growth`, `BestFirst`, `Branching` or `Choices`; None: a coupled chain, as deep as the
            block, as there are heads or stages, or as any other was trained for (if that is not said 5, of PARD 8, of
            MTP 3).
        dtype: of the parameters.

    Raises:
        FileNotFoundError: for no such directory.
        CheckpointError: for a drafter of no known kind or for another target, or tensors that are missing, unexpected
            or misshapen, all named; or for fields that contradict each other or ask for what is not built here.
    """
    fields = read_fields(path)
    model, params, layers = target.target, target.params, target.target.config.num_layers
    if parallel_files.is_published(fields):
        return _parallel(path, *parallel_files.from_published(path, fields, dtype), model, shape)
    if mtp_files.is_checkpoint(fields):
        return _mtp(*mtp_files.from_checkpoint(path, model, params, dtype), mtp_files.STEPS, shape)
    tensors = read_tensors(path)
    if fields.get("format") == native.FORMAT:
        config, head, own = native.from_native(path, fields, tensors, params, layers, dtype)
    elif weights.is_block(fields):
        config, head, own = weights.from_tensors(path, fields, tensors, params, layers, dtype)
    elif eagle_published.is_eagle(fields):
        config, own = eagle_weights.from_tensors(path, fields, tensors, model, params, dtype)
        shape = shape or eagle.chain(eagle_published.steps(fields))
        return LoadedDrafter(eagle.drafter(config, shape), own, eagle.tapped(config, model), {"network": config})
    elif medusa_files.is_medusa(fields):
        config, own = medusa_files.from_tensors(path, fields, tensors, model, params, dtype)
        drafter = medusa.drafter(config, shape or eagle.chain(config.num_heads))
        return LoadedDrafter(drafter, own, medusa.tapped(config, model), {"network": config})
    elif mlp_speculator_files.is_mlp(fields):
        config, own = mlp_speculator_files.from_tensors(path, fields, tensors, model, params, dtype)
        drafter = mlp_speculator.drafter(config, shape or eagle.chain(config.num_stages))
        return LoadedDrafter(drafter, own, medusa.tapped(config, model), {"network": config})
    elif fields.get("format") == recurrent_files.FORMAT:
        config, own, steps = recurrent_files.from_tensors(path, fields, tensors, model, params, dtype)
        drafter = recurrent.drafter(config, shape or eagle.chain(steps))
        return LoadedDrafter(drafter, own, medusa.tapped(config, model), {"network": config})
    elif fields.get("format") == early_exit.FORMAT:
        config, own = early_exit.from_tensors(path, fields, tensors, model, params, dtype)
        drafter = early_exit.drafter(config, shape or eagle.chain(config.depth))
        return LoadedDrafter(drafter, own, model, {"network": config})
    elif fields.get("speculators_model_type") == mtp_files.SPECULATORS:
        own = mtp_files.from_speculators(path, fields, tensors, model, params, dtype)
        return _mtp(*own, eagle_published.steps(fields, mtp_files.STEPS), shape)
    elif fields.get("format") == mtp_files.FORMAT:
        return _mtp(*mtp_files.from_tensors(path, fields, tensors, model, params, dtype), shape)
    elif fields.get("format") == parallel_files.FORMAT:
        return _parallel(path, *parallel_files.from_tensors(path, fields, tensors, dtype), model, shape)
    else:
        what = fields.get("speculators_model_type") or fields.get("architectures") or fields.get("format")
        raise CheckpointError(f"{path}: config.json is of {what!r}, which is no drafter of a kind known here")
    drafter = BlockDrafter(config, shape or chain(config, head), head)
    return LoadedDrafter(drafter, own, drafter.tapped(model), {"network": config, "head": head})


def _parallel(path: str | Path, config: ParallelConfig, params: Any, target: Any, shape: Any) -> LoadedDrafter:
    if config.vocab_size != target.vocab_size:
        raise CheckpointError(f"{path}: made for vocab_size {config.vocab_size}; the target has {target.vocab_size}")
    drafter = parallel_model.drafter(config, shape or eagle.chain(config.depth))
    return LoadedDrafter(drafter, params, target, {"network": config})


def _mtp(target: Any, params: Any, steps: int, shape: Any) -> LoadedDrafter:
    return LoadedDrafter(mtp.drafter(target, shape or eagle.chain(steps)), params, mtp.tapped(target), {})
