"""A drafter from a local directory, over the target that it drafts for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from spec_jax.drafters import medusa, medusa_files
from spec_jax.drafters.block import native, weights
from spec_jax.drafters.block.drafter import BlockDrafter, chain
from spec_jax.drafters.drafter import Drafter
from spec_jax.drafters.eagle import head as eagle
from spec_jax.drafters.eagle import published as eagle_published
from spec_jax.drafters.eagle import weights as eagle_weights
from spec_jax.drafters.files import read_directory
from spec_jax.models.checkpoint import CheckpointError


@dataclasses.dataclass(frozen=True)
class LoadedDrafter:
    """A drafter, its parameters, and the target as the engine has to have it: with the taps that the drafter reads."""

    drafter: Drafter
    params: Any
    target: Any

    @property
    def parts(self) -> dict[str, Any]:
        """What `configs.build` takes of it: its network, and of a block drafter the head."""
        drafter: Any = self.drafter
        if isinstance(drafter, BlockDrafter):
            return {"network": drafter.config, "head": drafter.head}
        return {"network": drafter.head.config}


def load_drafter(path: str | Path, target: Any, shape: Any = None, dtype: Any = jnp.float32) -> LoadedDrafter:
    """Read a directory with config.json and safetensors in any known format; which one, its config says.

    Block drafters: DFlash and DFlash 2 (z-lab), DSpark, JetSpec, Domino, TreeFlash, speculators (dflash, dflash2,
    dspark, xpress), and what `block.native.save_native` writes. EAGLE heads: EAGLE-3 (SafeAILab, SGLang), EAGLE-1 and
    EAGLE-2 (SGLang), speculators (eagle3, peagle), and what `eagle.weights.save` writes. Medusa's heads, and ours of
    Hydra (`medusa_files.save`).

    Args:
        path: the directory.
        target: the target as `models.load.load_target` gives it: `.target` and `.params`.
        shape: the drafts, a `Growth`, `BestFirst`, `Branching` or `Choices`; None: a coupled chain, as deep as
            the block, as an EAGLE head was trained for (5 if that is not said), or as there are heads.
        dtype: of the parameters.

    Raises:
        FileNotFoundError: for no such directory.
        CheckpointError: for a drafter of no known kind or for another target, or tensors that are missing, unexpected
            or misshapen, all named.
    """
    fields, tensors = read_directory(path)
    model, params, layers = target.target, target.params, target.target.config.num_layers
    if fields.get("format") == native.FORMAT:
        config, head, own = native.from_native(path, fields, tensors, params, dtype)
    elif weights.is_block(fields):
        config, head, own = weights.from_tensors(path, fields, tensors, params, layers, dtype)
    elif eagle_published.is_eagle(fields):
        config, own = eagle_weights.from_tensors(path, fields, tensors, model, params, dtype)
        shape = shape or eagle.chain(eagle_published.steps(fields))
        return LoadedDrafter(eagle.drafter(config, shape), own, eagle.tapped(config, model))
    elif medusa_files.is_medusa(fields):
        config, own = medusa_files.from_tensors(path, fields, tensors, model, params, dtype)
        drafter = medusa.drafter(config, shape or eagle.chain(config.num_heads))
        return LoadedDrafter(drafter, own, medusa.tapped(config, model))
    else:
        what = fields.get("speculators_model_type") or fields.get("architectures") or fields.get("format")
        raise CheckpointError(f"{path}: config.json is of {what!r}, which is no drafter of a kind known here")
    drafter = BlockDrafter(config, shape or chain(config, head), head)
    return LoadedDrafter(drafter, own, drafter.tapped(model))
