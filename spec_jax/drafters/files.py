"""A drafter's directory: config.json and safetensors, read whole and checked by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from spec_jax.models import shards
from spec_jax.models.checkpoint import CheckpointError, read_json

_STORED = (*shards.FLOATS, "I64", "I32", "BOOL", "U8")


def read_directory(directory: str | Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """config.json's fields, and every tensor by name, as stored. Raises as `read_fields` and `read_tensors`."""
    return read_fields(directory), read_tensors(directory)


def read_fields(directory: str | Path) -> dict[str, Any]:
    """config.json's fields. FileNotFoundError for no such directory, CheckpointError for a missing or damaged file."""
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no such directory")
    return read_json(directory / "config.json")


def read_tensors(directory: str | Path) -> dict[str, np.ndarray]:
    """Every tensor by name, as stored.

    Raises CheckpointError for a missing, damaged or contradictory file. No code in the directory is run; files that
    could hold code (pickles) are not read.
    """
    files = shards.weight_files(Path(directory), _STORED)
    return {name: shards.read(path, name) for path in files for name in shards.shapes(path, _STORED)}


def write_directory(directory: str | Path, fields: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """config.json and model.safetensors in a directory, which is made if it is not there."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, directory / shards.SINGLE)
    config = directory / "config.json"
    config.write_text(json.dumps(dict(fields), indent=2) + "\n", encoding="utf-8")
    (directory / shards.SINGLE).chmod(config.stat().st_mode)  # save_file's own files are for their owner alone


def architecture(fields: Mapping[str, Any]) -> str | None:
    """The first architecture that a config.json names; None where there is none, or anything else."""
    names = fields.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return first if isinstance(first, str) else None


def layer_fields(c: Any) -> dict[str, Any]:
    """What a drafter's config.json says of its decoder layers, whatever the drafter: sizes, norms and rope of `c`."""
    rope = {k: v for k, v in dataclasses.asdict(c.rope).items() if v is not None and k not in ("type", "theta")}
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        "max_position_embeddings": c.max_position_embeddings,
        "rope_parameters": {"rope_type": c.rope.type, "rope_theta": c.rope.theta, **rope},
        "tie_word_embeddings": False,
    }


def renamed(source: str | Path, tensors: Mapping[str, np.ndarray], name: Callable[[str], str]) -> dict[str, np.ndarray]:
    """Tensors by the names that other uploads have for them; CheckpointError for two that become one."""
    found: dict[str, np.ndarray] = {}
    for old, tensor in tensors.items():
        if (new := name(old)) in found:
            raise CheckpointError(f"{source}: {new} is there by two names, one of them {old}")
        found[new] = tensor
    return found


def check_names(
    source: str | Path,
    tensors: Mapping[str, np.ndarray],
    wanted: Mapping[str, tuple[int, ...]],
    whole: Collection[str] = ("d2t", "t2d"),
) -> None:
    """CheckpointError naming every missing, unexpected or misshapen tensor, and every one of another kind of number.

    Those in `whole` hold integers (or t2d booleans), all others floating-point numbers.
    """
    missing = [name for name in wanted if name not in tensors]
    unexpected = [name for name in tensors if name not in wanted]
    wrong = [
        f"{name} {list(tensors[name].shape)}, not {list(shape)}"
        for name, shape in wanted.items()
        if name in tensors and tensors[name].shape != shape
    ]
    wrong += [
        f"{name} of {tensors[name].dtype}, not {'integers' if name in whole else 'floating-point numbers'}"
        for name in wanted
        if name in tensors and not _holds(tensors[name], name in whole, boolean=name == "t2d")
    ]
    kinds = (("missing tensors", missing), ("unexpected tensors", unexpected), ("wrong tensors", wrong))
    problems = [f"{kind}: {', '.join(names)}" for kind, names in kinds if names]
    if problems:
        raise CheckpointError(f"{source}: {'; '.join(problems)}")


def _holds(tensor: np.ndarray, whole: bool, boolean: bool) -> bool:
    if boolean and tensor.dtype == np.bool_:
        return True
    return jnp.issubdtype(tensor.dtype, np.integer if whole else np.floating)  # numpy alone knows no bfloat16


def kept_tokens(source: str | Path, d2t: np.ndarray, t2d: np.ndarray | None, vocab_size: int) -> np.ndarray:
    """The target id of each token of a reduced vocabulary: d2t holds offsets, t2d says which target tokens are kept.

    Raises CheckpointError for ids outside the vocabulary, tokens twice, or a t2d of other tokens, or of other values
    than 0 and 1.
    """
    kept = np.arange(len(d2t)) + d2t.astype(np.int64)
    check_tokens(source, "d2t leads to", kept, vocab_size)
    if t2d is not None and not np.isin(t2d, (0, 1)).all():
        raise CheckpointError(f"{source}: t2d holds {np.setdiff1d(t2d, (0, 1))[0]}, takes 0 and 1, or booleans")
    if t2d is not None and not np.array_equal(np.flatnonzero(t2d), np.sort(kept)):
        raise CheckpointError(f"{source}: t2d keeps other tokens than d2t leads to")
    return kept.astype(np.int32)


def check_tokens(source: str | Path, what: str, kept: np.ndarray, vocab_size: int) -> None:
    """CheckpointError for target ids of a reduced vocabulary that are there twice, or outside of the target's."""
    if kept.min(initial=0) < 0 or kept.max(initial=0) >= vocab_size or len(set(kept.tolist())) != len(kept):
        raise CheckpointError(f"{source}: {what} ids twice, or outside 0 .. {vocab_size - 1}")
