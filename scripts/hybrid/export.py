"""A trained model as a Hugging Face directory; `spec_jax.models.load.load_target` reads it back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file

from spec_jax.models import qwen_tensors
from spec_jax.models.qwen import QwenParams
from spec_jax.models.qwen_config import QwenConfig

from .shape import to_hf
from .vocabulary import EOS, eos_id

_WEIGHTS = "model.safetensors"


def save(directory: Path, params: QwenParams, config: QwenConfig, tokenizer: tokenizers.Tokenizer, dtype: Any) -> None:
    """Write config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json.

    Experts are tensors one by one, the MTP head's are mtp.*. ValueError if a weight does not fit `dtype`.
    """
    with np.errstate(over="ignore"):  # found below
        tensors = {name: x.astype(dtype) for name, x in qwen_tensors.to_tensors(config, params, fused=False).items()}
    if wrong := [name for name, tensor in tensors.items() if not np.isfinite(tensor.astype(np.float32)).all()]:
        raise ValueError(f"params: {wrong[0]} has numbers that {np.dtype(dtype)} can't hold")
    directory.mkdir(parents=True, exist_ok=True)
    eos = eos_id(tokenizer)
    save_file(tensors, directory / _WEIGHTS, {"format": "pt"})
    (directory / _WEIGHTS).chmod(0o644)  # the library makes it private
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
    }
    for name, fields in (
        ("config.json", to_hf(config, eos)),
        ("generation_config.json", {"eos_token_id": eos, "pad_token_id": eos, "do_sample": False}),
        ("tokenizer_config.json", settings),
    ):
        (directory / name).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
