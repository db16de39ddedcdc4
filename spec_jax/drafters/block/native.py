"""Our own format of block drafters: any network and head, tensors named by their place in the parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.drafters import own_files
from spec_jax.drafters.block import names
from spec_jax.drafters.block.config import BlockConfig
from spec_jax.drafters.block.ends import ends_of
from spec_jax.drafters.block.heads.ancestor import Ancestor
from spec_jax.drafters.block.heads.bigram import Bigram
from spec_jax.drafters.block.heads.gru import Domino
from spec_jax.drafters.block.heads.head import Head, Plain
from spec_jax.drafters.block.heads.jacobi import Jacobi
from spec_jax.drafters.block.heads.lattice import Lattice
from spec_jax.drafters.block.heads.local import Local
from spec_jax.drafters.block.heads.markov import Markov
from spec_jax.drafters.block.heads.mixture import Mixture
from spec_jax.drafters.block.heads.selector import Selector
from spec_jax.drafters.block.heads.swiglu import SwiGlu
from spec_jax.drafters.block.network import BlockParams
from spec_jax.drafters.files import check_tokens
from spec_jax.models.checkpoint import CheckpointError
from spec_jax.models.linear import Dense

FORMAT = "spec_jax.block"
HEADS = {
    kind.__name__: kind
    for kind in (Plain, Markov, Domino, Selector, SwiGlu, Jacobi, Local, Mixture, Ancestor, Lattice, Bigram)
}


def save_native(
    directory: str | Path,
    config: BlockConfig,
    head: Head,
    params: BlockParams,
    dtype: Any = None,
    target: str | None = None,
) -> None:
    """Write a network, its head and, with a reduced vocabulary, its kept tokens and own lm_head; nothing of the target.

    dtype: that of floating-point tensors in the file, the parameters' own if None. target: what it was trained for.
    """
    parts = {part: getattr(params, part) for part in ("network", "head", "lm_head", "kept")}
    parts |= {} if config.own_head else {"lm_head": None}
    own = {"name": type(head).__name__, "settings": _settings(head)}
    fields = {"network": dataclasses.asdict(config), "head": own}
    own_files.save(directory, FORMAT, fields, parts, dtype, target)


def from_native(
    source: str | Path,
    fields: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    target_params: Any,
    target_layers: int,
    dtype: Any = jnp.float32,
) -> tuple[BlockConfig, Head, BlockParams]:
    """What `save_native` wrote, over a target's parameters. Raises CheckpointError for anything else."""
    try:
        own_files.check_fields(fields, "network", "head")
        config = own_files.config(BlockConfig, fields["network"])
        head = HEADS[fields["head"]["name"]](**own_files.tuples(fields["head"]["settings"]))
        network_shapes, head_shapes = names.shapes(config, head)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{Path(source) / 'config.json'}: not a block drafter's: {error!r}") from error
    ends = ends_of(target_params)
    if ends.embedding.shape != (config.hidden_size, config.vocab_size):
        size, vocab = ends.embedding.shape
        raise CheckpointError(
            f"{source}: made for hidden_size {config.hidden_size} and vocab_size {config.vocab_size}; "
            f"the target has {size} and {vocab}"
        )
    if max(config.taps) > target_layers:
        raise CheckpointError(f"{source}: taps {config.taps}; taken: the target's {target_layers} layers at most")
    template: dict[str, Any] = {"network": network_shapes, "head": head_shapes}
    if config.draft_vocab_size is not None:
        small = config.draft_vocab_size
        if config.own_head:
            template["lm_head"] = {"kernel": jax.ShapeDtypeStruct((config.hidden_size, small), jnp.float32)}
        template["kept"] = jax.ShapeDtypeStruct((small,), jnp.int32)
    own = own_files.read(source, tensors, template, dtype)
    kept = own.get("kept")
    if kept is not None:
        check_tokens(source, "kept holds", tensors["kept"], config.vocab_size)
    if isinstance(head, Bigram):
        check_successors(source, tensors["head.successors"], config.vocab_size)
    lm_head = Dense(**own["lm_head"]) if "lm_head" in own else None
    return config, head, BlockParams(own["network"], ends, own["head"], ends.drafted(lm_head, kept), kept)


def check_successors(source: str | Path, ids: np.ndarray, vocab_size: int) -> None:
    """CheckpointError for a table of successors that holds a token twice behind one, or others than the target's."""
    ranked = np.sort(ids, axis=1)
    twice = ((ranked[:, 1:] == ranked[:, :-1]) & (ranked[:, 1:] >= 0)).any()
    if twice or ids.min(initial=0) < -1 or ids.max(initial=0) >= vocab_size:
        raise CheckpointError(f"{source}: head.successors holds ids twice in a row, or outside -1 .. {vocab_size - 1}")


def _settings(head: Head) -> dict[str, Any]:
    return {f.name: getattr(head, f.name) for f in dataclasses.fields(head) if f.init}  # type: ignore[arg-type]
