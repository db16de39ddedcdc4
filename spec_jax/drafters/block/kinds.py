"""Which kind of block drafter a config.json describes, and which fields go with it alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_jax.drafters.known import check_speculator
from spec_jax.models.fields import is_size, require

ARCHITECTURES = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
    "DominoDraftModel": "domino",
    "JetSpecDraftModel": "dflash",
    "TreeFlashDraftModel": "treeflash",
}
SPECULATORS = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark", "xpress": "XPress"}
"""What the names of speculators' own classes begin with, by its types."""

_ONLY = {
    "dflash2": ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    "dspark": (
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
        "num_anchors",
    ),
    "domino": ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "shift_label"),
    "treeflash": ("ar_approximation",),
    "xpress": ("xpress_rank", "xpress_mlp_ratio", "num_jacobi_passes"),
}
KNOWN = {
    *("mask_token_id", "target_layer_ids", "block_size", "projector_type", "causal_head", "draft_shift"),
    *("input_embedding_scale", "output_multiplier", "final_logit_softcapping", "target_hidden_size"),
    *("num_anchors", "loss_decay_gamma"),
    *(name for names in _ONLY.values() for name in names),
}
"""What dflash_config may hold, of one kind or another."""

_PROJECTORS = {None: None, "dflash": None, "dspark": "dspark", "domino": "domino", "causal_v5": "domino"}
_SPECULATOR = (
    *("block_size", "aux_hidden_state_layer_ids", "mask_token_id", "sliding_window_non_causal", "sample_from_anchor"),
    "num_anchors",
)


def kind_of(fields: Mapping[str, Any]) -> str:
    """The kind of a config.json in its authors' form; ValueError for fields that belong to another one."""
    names = fields.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    require(isinstance(name, str) and name in ARCHITECTURES, "architectures", names, ", ".join(ARCHITECTURES))
    kind, projector = ARCHITECTURES[str(name)], fields.get("projector_type")
    known = projector is None or isinstance(projector, str) and projector in _PROJECTORS
    require(known, "projector_type", projector, ", ".join(map(str, _PROJECTORS)))
    named = _PROJECTORS[projector]
    if kind == "dflash" and named is None and fields.get("markov_rank") is not None:
        named = "dspark"  # some uploads carry DFlash's architecture
    if named is not None:
        require(kind in ("dflash", named), "projector_type", projector, f"one that goes with architectures {name}")
        kind = named
    _check_only(fields, kind, f"architectures {name}")
    if kind == "dflash2":
        for field in ("conv_kernel_size", "selector_rank"):
            require(is_size(fields.get(field)), field, fields.get(field), "a positive integer with DFlash 2")
    return kind


def speculator_of(fields: Mapping[str, Any]) -> str:
    """The type of a speculators config; ValueError for fields, architectures or an algorithm of another one."""
    kind: Any = fields.get("speculators_model_type")
    require(isinstance(kind, str) and kind in SPECULATORS, "speculators_model_type", kind, ", ".join(SPECULATORS))
    _check_only(fields, kind, f"speculators_model_type {kind}")
    check_speculator(fields, SPECULATORS[kind], (*_SPECULATOR, *_ONLY.get(kind, ())))
    return kind


def _check_only(fields: Mapping[str, Any], kind: str, told: str) -> None:
    for other, own in _ONLY.items():
        for field in own:
            if other != kind and field != "num_anchors" and fields.get(field) is not None:
                raise ValueError(f"{field} is {fields[field]!r} with {told}; taken with {other} alone")
