"""A loaded checkpoint, and the check that it holds exactly the tensors its config calls for."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from spec_jax.models import qwen_shapes
from spec_jax.models.config import LlamaConfig
from spec_jax.models.qwen_config import QwenConfig

if TYPE_CHECKING:
    from spec_jax.models.tokenizer import Tokenizer

DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))

_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_LARGEST_JSON = 1 << 26
_ROWS = 4096


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete, inconsistent, or of a kind that is not supported."""


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor still on disk: its shape and type are known, `np.asarray` reads it (each time anew), `[box]` a part.

    part: reads a box alone, slices with a start and a stop for every axis; None where the file allows no less than all.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray] = dataclasses.field(repr=False)
    part: Callable[[tuple[slice, ...]], np.ndarray] | None = dataclasses.field(default=None, repr=False)

    def __getitem__(self, box: tuple[slice, ...]) -> np.ndarray:
        """Read a box; raises CheckpointError if the file has changed since."""
        return self.read()[box] if self.part is None else self.part(box)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Read the tensor; raises CheckpointError if the file has changed since."""
        if copy is False:
            raise ValueError("copy is False; taken: True or None, a tensor on disk can't be read without a copy")
        return self.read().astype(dtype or self.dtype, copy=False)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model as its files hold it.

    tensors: Hugging Face's names to float32 or bfloat16 arrays in [out, in] orientation, read from disk when used.
    tokenizer: None if the files have none.
    eos_token_ids: the tokens that end a text, in the files' order; maybe empty.
    """

    config: LlamaConfig | QwenConfig
    tensors: Mapping[str, LazyTensor | np.ndarray]
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    source: Path


def required_tensors(config: LlamaConfig | QwenConfig, present: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor of a model; a tied head is not among them.

    Where a family's files come in several layouts, the names in `present` say which.
    """
    if isinstance(config, QwenConfig):
        return qwen_shapes.required_tensors(config, present)
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        for block, maps, bias in (("self_attn", attention, config.attention_bias), ("mlp", mlp, config.mlp_bias)):
            shapes |= {f"{layer}.{block}.{name}_proj.weight": shape for name, shape in maps.items()}
            if bias:
                shapes |= {f"{layer}.{block}.{name}_proj.bias": shape[:1] for name, shape in maps.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def validate(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError naming every missing, unexpected or misshapen tensor, and any token id out of range.

    Rotary `inv_freq` buffers of older files are passed over; the head of a tied model may be there if it equals the
    embedding.
    """
    config, tensors = checkpoint.config, checkpoint.tensors
    if config.num_layers > len(tensors):
        raise CheckpointError(f"{checkpoint.source}: {config.num_layers} layers in the config, {len(tensors)} tensors")
    shapes = required_tensors(config, tensors)
    missing = [name for name in shapes if name not in tensors]
    tied = config.tie_word_embeddings and "lm_head.weight" in tensors
    if tied:
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    unexpected = [name for name in tensors if name not in shapes and not _BUFFER.fullmatch(name)]
    wrong = [
        f"{name} {t.dtype.name}{list(t.shape)}, not {list(shape)} of float32 or bfloat16"
        for name, shape in shapes.items()
        if name in tensors and ((t := tensors[name]).shape != shape or t.dtype not in DTYPES)
    ]
    kinds = (("missing tensors", missing), ("unexpected tensors", unexpected), ("wrong tensors", wrong))
    problems = [f"{kind}: {_listed(names)}" for kind, names in kinds if names]
    if tied and not problems:
        embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
        rows, hidden = embedding.shape
        boxes = ((slice(at, min(at + _ROWS, rows)), slice(0, hidden)) for at in range(0, rows, _ROWS))
        if not all(np.array_equal(embedding[box], head[box]) for box in boxes):
            problems.append("tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight")
    if checkpoint.tokenizer is not None and checkpoint.tokenizer.vocab_size > config.vocab_size:
        size = checkpoint.tokenizer.vocab_size
        problems.append(f"the tokenizer has {size} tokens, the embedding only {config.vocab_size} rows")
    if outside := [i for i in checkpoint.eos_token_ids if not 0 <= i < config.vocab_size]:
        problems.append(f"eos token ids {outside} are outside the vocabulary of {config.vocab_size}")
    if problems:
        raise CheckpointError(f"{checkpoint.source}: {'; '.join(problems)}")


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON file that holds an object; CheckpointError if it is not there or anything else."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    if path.stat().st_size > _LARGEST_JSON:
        raise CheckpointError(f"{path}: over {_LARGEST_JSON >> 20} MiB")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}; taken: an object")
    return value


def _listed(names: Iterable[str], most: int = 20) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
