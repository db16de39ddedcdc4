"""Block drafters from directories in the formats of their authors, of speculators and our own, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from spec_jax.drafters.block import kinds, names, publish, published
from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.ends import Ends, ends_of
from spec_jax.drafters.block.heads.head import Head
from spec_jax.drafters.block.heads.swiglu import SwiGlu
from spec_jax.drafters.block.network import BlockParams
from spec_jax.drafters.files import architecture, check_names, kept_tokens, renamed, write_directory
from spec_jax.drafters.named import file_shapes, from_file, reading_config, to_file
from spec_jax.models.fields import require
from spec_jax.models.linear import PLAIN, Dense


def is_block(fields: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a block drafter in a published format."""
    if "speculators_model_type" in fields:
        return fields["speculators_model_type"] in tuple(kinds.SPECULATORS)
    return architecture(fields) in kinds.ARCHITECTURES


def from_tensors(
    source: str | Path,
    fields: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    target_params: Any,
    target_layers: int,
    dtype: Any = jnp.float32,
) -> tuple[BlockConfig, Head, BlockParams]:
    """The network, head and parameters of a published directory, over a target's parameters.

    A file's own embedding and head (DSpark's) are the target's where they are equal, and the file's otherwise.

    Raises:
        CheckpointError: for tensors that the config does not call for, does not find, or finds in another shape, all
            named; or a config that is of no known kind, contradicts itself or is for another target.
    """
    ends = ends_of(target_params)
    vocab = ends.embedding.shape[1]
    with reading_config(source):
        if "speculators_model_type" in fields:
            kind, config, head = published.read_speculators(fields, vocab)
        else:
            kind, config, head = published.read_config(fields, vocab, target_layers)
        if config.hidden_size != ends.embedding.shape[0]:
            raise ValueError(f"hidden_size is {config.hidden_size}; taken: the target's, {ends.embedding.shape[0]}")
        if max(config.taps) > target_layers:
            raise ValueError(f"layer ids reach {max(config.taps)} layers; taken: the target's {target_layers} at most")
        if kind == "treeflash":
            down = tensors.get("ar_approximation.d.weight")  # None: named with whatever else is missing
            shape = (config.hidden_size, 1) if down is None else down.shape
            fits = len(shape) == 2 and shape[1] > 0
            require(fits, "ar_approximation.d.weight", list(shape), f"[{config.hidden_size}, the head's size]")
            head = SwiGlu(shape[1])
    tensors = renamed(source, tensors, lambda name: _usual(name, kind))
    parts = list(zip(names.shapes(config, head), names.published(config, head), strict=True))
    wanted = {n: s for shapes, known in parts for n, s in file_shapes(shapes, known.__getitem__).items()}
    tensors, ends, lm_head, kept, more = _vocabulary(source, config, tensors, ends, kind, dtype)
    check_names(source, tensors, wanted | more)
    network, own = (from_file(shapes, known.__getitem__, tensors, dtype) for shapes, known in parts)
    return config, head, BlockParams(network, ends, own, lm_head, kept)


def to_tensors(config: BlockConfig, head: Head, params: BlockParams) -> dict[str, np.ndarray]:
    """Tensors in their published names.

    Raises ValueError for parameters that the format has no place for.
    """
    network_names, head_names = names.published(config, head)
    return to_file(params.network, network_names.__getitem__) | to_file(params.head, head_names.__getitem__)


def save_published(
    directory: str | Path, config: BlockConfig, head: Head, params: BlockParams, target_layers: int
) -> None:
    """Write a directory in the form that the network's authors publish; `drafters.load.load_drafter` reads it.

    Raises ValueError for a network, head or setting that the form can't hold.
    """
    fields, tensors = publish.write_config(config, head, target_layers), to_tensors(config, head, params)
    if isinstance(head, SwiGlu):
        inside = lambda n: n if n.startswith("ar_approximation.") else f"model.{n}"  # noqa: E731
        tensors = {inside(name): x for name, x in tensors.items()}
    if fields["architectures"] == ["Qwen3DSparkModel"]:
        tensors |= _copies(params.ends)
    write_directory(directory, fields, tensors)


def save_speculators(
    directory: str | Path, config: BlockConfig, head: Head, params: BlockParams, target: Mapping[str, Any]
) -> None:
    """Write a directory in the speculators format; `target` has the target's name_or_path and architectures."""
    tensors = to_tensors(config, head, params)
    if params.kept is not None and params.lm_head is not None:
        kept = np.asarray(params.kept, np.int64)
        mask = np.zeros(config.vocab_size, bool)
        mask[kept] = True
        tensors |= {"d2t": kept - np.arange(len(kept)), "t2d": mask, "lm_head.weight": _kernel(params.lm_head).T}
    write_directory(directory, publish.write_speculators(config, head, target), tensors)


def _usual(name: str, kind: str) -> str:
    """A name without Domino's older logit_head., TreeFlash's model. of the backbone, and .weight behind codebooks."""
    if kind == "dflash2" and name.endswith("_codebook.weight"):
        return name.removesuffix(".weight")
    return name.removeprefix({"domino": "logit_head.", "treeflash": "model."}.get(kind, ""))


def _vocabulary(
    source: str | Path, config: BlockConfig, tensors: dict[str, np.ndarray], ends: Ends, kind: str, dtype: Any
) -> tuple[dict[str, np.ndarray], Ends, Dense | None, Any, dict[str, tuple[int, ...]]]:
    """Embedding, head and reduced vocabulary: what of them the file has, and must have."""
    wide = (config.vocab_size, config.hidden_size)
    if config.draft_vocab_size is not None:
        more = {"lm_head.weight": (config.draft_vocab_size, config.hidden_size)}
        more |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
        check_names(source, {n: tensors[n] for n in more if n in tensors}, more)
        kept = kept_tokens(source, tensors["d2t"], tensors["t2d"], config.vocab_size)
        head = Dense(jnp.asarray(tensors["lm_head.weight"].T).astype(dtype))
        more |= {"embed_tokens.weight": wide} if "embed_tokens.weight" in tensors else {}
        return tensors, _own_ends(tensors, more, ends, dtype, head=False), head, jnp.asarray(kept), more
    copies = {n: wide for n in ("embed_tokens.weight", "lm_head.weight") if n in tensors}
    check_names(source, {n: tensors[n] for n in copies}, copies)
    return tensors, _own_ends(tensors, copies, ends, dtype), None, None, copies


def _own_ends(
    tensors: Mapping[str, np.ndarray], copies: Mapping[str, Any], ends: Ends, dtype: Any, head: bool = True
) -> Ends:
    """The target's ends, or the file's where they differ."""
    old = _copies(ends)
    differ = lambda n: n in copies and not np.array_equal(tensors[n].astype(old[n].dtype), old[n])  # noqa: E731
    new = lambda n: jnp.asarray(tensors[n].T).astype(dtype)  # noqa: E731
    if head and differ("lm_head.weight"):
        ends = dataclasses.replace(ends, head=Dense(new("lm_head.weight")))
    if differ("embed_tokens.weight"):
        output = ends.output
        ends = dataclasses.replace(ends, embedding=new("embed_tokens.weight"), head=output)
    return ends


def _copies(ends: Ends) -> dict[str, np.ndarray]:
    head = ends.embedding if ends.head is None else _kernel(ends.head)
    return {"embed_tokens.weight": np.asarray(ends.embedding).T, "lm_head.weight": np.asarray(head).T}


def _kernel(linear: Any) -> np.ndarray:
    if not isinstance(linear, PLAIN) or linear.bias is not None:
        raise ValueError(f"lm_head: got {type(linear).__name__} or a bias, takes a dense head without one")
    return np.asarray(linear.kernel)
