"""MLP speculators in directories as IBM publishes them: model_type mlp_speculator, tensors emb, proj, ln and head."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.drafters import medusa
from spec_jax.drafters.block.ends import ends_of
from spec_jax.drafters.files import check_names, renamed, write_directory
from spec_jax.drafters.mlp_speculator import MlpConfig, MlpParams, init_params
from spec_jax.drafters.named import file_shapes, from_file, reading_config, to_file
from spec_jax.models.fields import count_of, flag_of, require_only, size_of

ARCHITECTURE = "MLPSpeculatorPreTrainedModel"
_PREFIX = "speculator."
_NAMES = {"embeddings": "emb", "projections": "proj", "norms": "ln", "outputs": "head"}


def is_mlp(fields: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an MLP speculator."""
    return fields.get("model_type") == "mlp_speculator"


def from_tensors(
    source: str | Path,
    fields: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    target: Any,
    target_params: Any,
    dtype: Any = jnp.float32,
) -> tuple[MlpConfig, MlpParams]:
    """The stages of a directory, over a target (a `Llama` or `Qwen`) and its parameters.

    Of tied weights a file may hold a copy for every stage, which has to be the same. Names may lack their prefix. The
    config's n_candidates and top_k_tokens_per_head are not read: a drafter's shape says what it drafts.

    Raises:
        CheckpointError: naming tensors that are missing, unexpected or misshapen, or fields that do not fit.
    """
    with reading_config(source):
        require_only(fields, ("architectures", [ARCHITECTURE], ([ARCHITECTURE], ARCHITECTURE)))
        config = MlpConfig(
            size_of(fields, "vocab_size"),
            size_of(fields, "emb_dim"),
            size_of(fields, "n_predict", 3),
            count_of(fields, "inner_dim", 0) or None,
            flag_of(fields, "tie_weights"),
            flag_of(fields, "scale_input"),
            target.config.rms_norm_eps,
        )
        medusa.tapped(config, target)
    ends = ends_of(target_params)
    own = medusa.own_parts(jax.eval_shape(lambda key: init_params(config, key, ends), jax.random.key(0)))
    wanted = file_shapes(own, _name)
    tensors = _once(config, renamed(source, tensors, _prefixed), wanted)
    check_names(source, tensors, wanted)
    return config, MlpParams(**from_file(own, _name, tensors, dtype), ends=ends)


def save(directory: str | Path, config: MlpConfig, params: MlpParams, target: str, dtype: Any = None) -> None:
    """Write a directory as `from_tensors` and vLLM read it; `target` is what the stages were trained for."""
    tensors = to_file(medusa.own_parts(params), _name)
    tensors = tensors if dtype is None else {name: x.astype(dtype) for name, x in tensors.items()}
    fields = {
        "architectures": [ARCHITECTURE],
        "model_type": "mlp_speculator",
        "base_model_name_or_path": target,
        "vocab_size": config.vocab_size,
        "emb_dim": config.hidden_size,
        "inner_dim": config.inner_size or 0,
        "n_predict": config.num_stages,
        "n_candidates": 5,
        "top_k_tokens_per_head": [max(1, 5 - i) for i in range(config.num_stages)],
        "tie_weights": config.tie_weights,
        "scale_input": config.scale_input,
    }
    write_directory(directory, fields, tensors)


def _name(path: str) -> str:
    part, stage, *rest = path.split(".")
    return f"{_PREFIX}{_NAMES[part]}.{stage}.{'bias' if rest == ['bias'] else 'weight'}"


def _prefixed(name: str) -> str:
    return _PREFIX + name if name.split(".")[0] in _NAMES.values() else name


def _once(
    config: MlpConfig, tensors: Mapping[str, np.ndarray], wanted: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """The tensors without the later stages' copies of tied ones."""

    def is_copy(name: str, tensor: np.ndarray) -> bool:
        parts = name.split(".")
        if not config.tie_weights or name in wanted or len(parts) != 4 or parts[2] not in later:
            return False
        first = ".".join([*parts[:2], "1" if parts[1] == "proj" else "0", parts[3]])
        return first in wanted and first in tensors and np.array_equal(tensors[first], tensor)

    later = {str(i) for i in range(1, config.num_stages)}
    return {name: tensor for name, tensor in tensors.items() if not is_copy(name, tensor)}
