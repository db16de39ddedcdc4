"""EAGLE heads from directories in the formats of SafeAILab and SGLang, and of speculators; and back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.drafters.block.ends import Ends, ends_of
from spec_jax.drafters.eagle import published
from spec_jax.drafters.eagle.config import EagleConfig
from spec_jax.drafters.eagle.network import EagleParams, init_network
from spec_jax.drafters.files import check_names, kept_tokens, write_directory
from spec_jax.drafters.named import file_shapes, from_file, reading_config, to_file
from spec_jax.models.checkpoint import CheckpointError
from spec_jax.models.linear import PLAIN, Dense

_LAYER = {
    "input_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    **{f"{p}.kernel": f"self_attn.{p}_proj.weight" for p in "qkvo"},
    **{f"{p}.bias": f"self_attn.{p}_proj.bias" for p in "qkvo"},
    **{f"{p}_norm": f"self_attn.{p}_norm.weight" for p in "qk"},
    **{f"{p}.kernel": f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")},
}
MASK = "mask_hidden"
_NETWORK = {"fc.kernel": "fc.weight", "fc.bias": "fc.bias", "norm": "norm.weight", MASK: MASK}


def from_tensors(
    source: str | Path,
    fields: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    target: Any,
    target_params: Any,
    dtype: Any = jnp.float32,
) -> tuple[EagleConfig, EagleParams]:
    """The head and its parameters of a published directory, over a target (a `Llama` or `Qwen`) and its parameters.

    A file's own embedding is the target's where they are equal, and the file's otherwise.

    Raises:
        CheckpointError: for tensors that the config does not call for, does not find, or finds in another shape, all
            named; or a config that is of no known kind, contradicts itself or is for another target.
    """
    tensors = dict(tensors)
    with reading_config(source):
        config, middle = published.read_config(fields, tensors, target.config)
    wide, size = (config.vocab_size, config.hidden_size), config.logit_size
    shapes = jax.eval_shape(lambda key: init_network(config, key), jax.random.key(0))
    name = functools.partial(_name, config, middle=middle)
    wanted = file_shapes(shapes, name)
    wanted |= {MASK: (1, 1, *wanted[MASK])} if MASK in wanted else {}
    wanted |= {"lm_head.weight": (size, config.hidden_size)} if config.own_head else {}
    wanted |= {"embed_tokens.weight": wide} if "embed_tokens.weight" in tensors else {}
    small = config.draft_vocab_size is not None
    wanted |= {"d2t": (size,)} if small or "d2t" in tensors else {}
    wanted |= {"t2d": (config.vocab_size,)} if small or "t2d" in tensors else {}
    check_names(source, tensors, wanted)
    kept = None
    if "d2t" in wanted:
        kept = kept_tokens(source, tensors["d2t"], tensors.get("t2d"), config.vocab_size)
        if not small and (kept != np.arange(size)).any():
            raise CheckpointError(f"{source}: d2t moves tokens, though all of them are drafted")
    ends = _ends(tensors, ends_of(target_params), dtype)
    head = Dense(jnp.asarray(tensors["lm_head.weight"].T).astype(dtype)) if config.own_head else None
    ids = jnp.asarray(kept) if small else None
    return config, EagleParams(from_file(shapes, name, tensors, dtype), ends, ends.drafted(head, ids), ids)


def to_tensors(config: EagleConfig, params: EagleParams) -> dict[str, np.ndarray]:
    """Tensors in the names of `save`: those of the network, and of a map to logits of its own."""
    out = to_file(params.network, functools.partial(_name, config, middle="layers.0."))
    out |= {MASK: out[MASK][None, None]} if MASK in out else {}
    if config.own_head and params.lm_head is not None:
        if not isinstance(params.lm_head, PLAIN) or params.lm_head.bias is not None:
            raise ValueError(f"lm_head: got a {type(params.lm_head).__name__} or a bias, takes a dense one without")
        out["lm_head.weight"] = np.asarray(params.lm_head.kernel).T
    if params.kept is not None:
        kept = np.asarray(params.kept, np.int64)
        mask = np.zeros(config.vocab_size, bool)
        mask[kept] = True
        out |= {"d2t": kept - np.arange(len(kept)), "t2d": mask}
    return out


def save(
    directory: str | Path,
    config: EagleConfig,
    params: EagleParams,
    target: Mapping[str, Any],
    steps: int = 5,
    dtype: Any = None,
    copy_head: bool = True,
) -> None:
    """Write a directory that `drafters.load.load_drafter` reads: EAGLE-3 and P-EAGLE in the speculators format, EAGLE-1
    in SGLang's. Of the target's own arrays nothing is written but the map to logits that the speculators format wants.

    Args:
        directory: made if it is not there.
        config: the head's.
        params: its parameters.
        target: the target's name_or_path and architectures.
        steps: tokens that it was trained to draft.
        dtype: that of floating-point tensors in the file, the parameters' own if None.
        copy_head: False leaves out a map to logits that is the target's: a smaller directory, for this library alone.
    """
    tensors = to_tensors(config, params)
    fields = published.write_config(config, target, steps)
    if config.inputs == "joined" and not config.own_head:
        if copy_head:
            tensors["lm_head.weight"] = np.asarray(params.ends.columns(params.kept).kernel).T
        else:
            fields[published.HEAD] = published.TARGET
    if dtype is not None:
        cast = lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
        tensors = {name: cast(x) for name, x in tensors.items()}
    write_directory(directory, fields, tensors)


def _name(config: EagleConfig, path: str, middle: str) -> str:
    """A parameter's name in a file; `middle` is what the first layer's names begin with."""
    if path in _NETWORK:
        return _NETWORK[path]
    if path == "context_norm":
        return f"{middle}hidden_norm.weight"
    if path.startswith("feature_norms."):
        return f"fc_norm.{path.split('.')[1]}.weight" if config.feature_norm == "each" else "input_norm.weight"
    _, index, leaf = path.split(".", 2)
    return (middle if index == "0" else f"layers.{index}.") + _LAYER[leaf]


def _ends(tensors: Mapping[str, np.ndarray], ends: Ends, dtype: Any) -> Ends:
    """The target's, or with the file's embedding where that is another one."""
    own, old = tensors.get("embed_tokens.weight"), np.asarray(ends.embedding).T
    if own is None or np.array_equal(own.astype(old.dtype), old):
        return ends
    return dataclasses.replace(ends, embedding=jnp.asarray(own.T).astype(dtype), head=ends.output)
