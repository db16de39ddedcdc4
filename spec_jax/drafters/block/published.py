"""Published block drafters' config.json: what network, head and slots it means, in every format that is out there."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from spec_jax.drafters.block.config import FULL, SLIDING, BlockConfig, causal_layers, default_taps
from spec_jax.drafters.block.heads.gru import Domino
from spec_jax.drafters.block.heads.head import Head, Plain
from spec_jax.drafters.block.heads.jacobi import Jacobi
from spec_jax.drafters.block.heads.markov import Markov
from spec_jax.drafters.block.heads.selector import Selector
from spec_jax.drafters.block.heads.swiglu import SwiGlu
from spec_jax.models.config import rope_from_hf
from spec_jax.models.fields import (
    count_of,
    first_windowed,
    flag_of,
    ids_of,
    is_size,
    kinds_of,
    number_of,
    object_of,
    read,
    require,
    require_only,
    size_of,
    token_of,
)

ARCHITECTURES = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
    "DominoDraftModel": "domino",
    "JetSpecDraftModel": "dflash",
    "TreeFlashDraftModel": "treeflash",
}
SPECULATORS = ("dflash", "dflash2", "dspark", "xpress")

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
}
_KNOWN = {
    *("mask_token_id", "target_layer_ids", "block_size", "projector_type", "causal_head", "draft_shift"),
    *("input_embedding_scale", "output_multiplier", "final_logit_softcapping", "target_hidden_size"),
    *("num_anchors", "loss_decay_gamma"),
    *(name for names in _ONLY.values() for name in names),
}
_PROJECTORS = {None: None, "dflash": None, "dspark": "dspark", "domino": "domino", "causal_v5": "domino"}


def read_config(fields: Mapping[str, Any], vocab_size: int, target_layers: int) -> tuple[str, BlockConfig, Head]:
    """The kind, the network and the head that a config.json in the z-lab, DSpark, JetSpec or Domino form describes.

    Raises ValueError, naming the field, for fields that belong to another kind than the architecture, that would make
    another network, or that are not known.
    """
    own = object_of(fields, "dflash_config") | object_of(fields, "treeflash_config")
    if unknown := own.keys() - _KNOWN:
        raise ValueError(f"dflash_config has {', '.join(sorted(unknown))}; taken: {', '.join(sorted(_KNOWN))}")
    every = {**fields, **{name: value for name, value in own.items() if value is not None}}
    kind = _kind(every)
    layers = size_of(fields, "num_hidden_layers")
    kinds = _layer_types(fields, layers)
    causal = causal_layers(kinds, flag_of(fields, "is_causal") if fields.get("is_causal") is not None else None)
    if flag_of(every, "causal_head"):
        causal = (True,) * layers
    shifted = [flag_of(every, name) for name in ("shift_label", "draft_shift")]
    ids = ids_of(every, "target_layer_ids")
    taps = default_taps(size_of(every, "num_target_layers", target_layers), layers)
    config = _network(
        fields,
        every,
        vocab_size,
        layer_types=kinds,
        causal=causal,
        taps=taps if ids is None else tuple(i + 1 for i in ids),
        slots="shifted" if kind == "dspark" or any(shifted) else "fill_in",
        block_size=size_of(every, "block_size", 16),
        conv_kernel_size=size_of(every, "conv_kernel_size") if kind == "dflash2" else None,
        conv_group_size=size_of(every, "conv_group_size", 16) if kind == "dflash2" else None,
    )
    return kind, config, _head(kind, every)


def read_speculators(fields: Mapping[str, Any], vocab_size: int) -> tuple[str, BlockConfig, Head]:
    """The same of the speculators format, whose layer ids count as our taps do."""
    kind = fields.get("speculators_model_type")
    require(kind in SPECULATORS, "speculators_model_type", kind, ", ".join(SPECULATORS))
    layer = object_of(fields, "transformer_layer_config")
    layers = size_of(layer, "num_hidden_layers")
    kinds = _layer_types(layer, layers)
    ids, named = ids_of(fields, "aux_hidden_state_layer_ids"), "aux_hidden_state_layer_ids"
    require(ids is not None, named, ids, "a list of ids")
    bidirectional = flag_of(fields, "sliding_window_non_causal", kind == "dflash2")
    small = size_of(fields, "draft_vocab_size", vocab_size)
    config = _network(
        layer,
        fields,
        vocab_size,
        layer_types=kinds,
        causal=causal_layers(kinds, False if bidirectional else None),
        taps=ids,
        slots="shifted" if flag_of(fields, "sample_from_anchor", kind == "dspark") else "fill_in",
        block_size=size_of(fields, "block_size", 8),
        conv_kernel_size=size_of(fields, "conv_kernel_size", 2) if kind == "dflash2" else None,
        conv_group_size=size_of(fields, "conv_group_size", 16) if kind == "dflash2" else None,
        draft_vocab_size=None if small == vocab_size else small,
    )
    return str(kind), config, _head(str(kind), fields)


def _kind(fields: Mapping[str, Any]) -> str:
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
    for other, own in _ONLY.items():
        for field in own:
            if other != kind and field != "num_anchors" and fields.get(field) is not None:
                raise ValueError(f"{field} is {fields[field]!r} with architectures {name}; taken with {other} alone")
    if kind == "dflash2":
        for field in ("conv_kernel_size", "selector_rank"):
            require(is_size(fields.get(field)), field, fields.get(field), "a positive integer with DFlash 2")
    return kind


def _head(kind: str, fields: Mapping[str, Any]) -> Head:
    size = functools.partial(size_of, fields)
    if kind == "dspark":
        with_markov = flag_of(fields, "confidence_head_with_markov", True)
        sure = flag_of(fields, "enable_confidence_head", True)
        form: Any = read(fields, "markov_head_type", "vanilla")
        require_only({"markov_head_type": form}, ("markov_head_type", None, ("vanilla", "gated", "rnn")))
        return Markov(size("markov_rank", 256), form, ("markov" if with_markov else "hidden") if sure else None)
    if kind == "domino":
        pure = count_of(fields, "pure_draft_prefix_len", 1)
        return Domino(size("gru_hidden_dim", 1024), size("emb_dim", 256), pure)
    if kind == "dflash2":
        return Selector(size("selector_rank", 256), size("selector_top_k", 16))
    if kind == "xpress":
        return Jacobi(size("xpress_rank", 256), size("xpress_mlp_ratio", 2), size("num_jacobi_passes", 6))
    if kind == "treeflash":
        require_only(fields, ("ar_approximation", None, ("swiglu",)))
        return SwiGlu(1)  # its size stands in the tensors alone
    return Plain()


def _network(fields: Mapping[str, Any], every: Mapping[str, Any], vocab_size: int, **own: Any) -> BlockConfig:
    """fields: the layers'; every: those and the drafter's own."""
    require_only(
        fields,
        ("model_type", "qwen3", ("qwen3",)),
        ("hidden_act", "silu", ("silu",)),
        ("attention_bias", False, (False,)),
        ("quantization_config", None, (None,)),
        ("hidden_dim_adapter", None, (None, False)),
        ("vocab_size", vocab_size, (vocab_size,)),
    )
    hidden, heads = size_of(fields, "hidden_size"), size_of(fields, "num_attention_heads")
    require_only(every, ("target_hidden_size", None, (None, hidden)))
    positions = size_of(fields, "max_position_embeddings", 32768)
    cap = read(every, "final_logit_softcapping", 0)  # 0 is none, as in dflash
    return BlockConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=size_of(fields, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=size_of(fields, "num_key_value_heads", heads),
        head_dim=size_of(fields, "head_dim", 128),
        mask_token=token_of(every, "mask_token_id", vocab_size),
        sliding_window=size_of(fields, "sliding_window") if SLIDING in own["layer_types"] else None,
        rms_norm_eps=number_of(fields, "rms_norm_eps", 1e-6),
        rope=rope_from_hf(fields, positions),
        max_position_embeddings=positions,
        embedding_scale=number_of(every, "input_embedding_scale", 1.0),
        output_multiplier=number_of(every, "output_multiplier", 1.0),
        softcap=None if cap == 0 and cap is not False else number_of(every, "final_logit_softcapping"),
        **own,
    )


def _layer_types(fields: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    first = first_windowed(fields, layers)
    return kinds_of(fields, layers) or tuple(SLIDING if i >= first else FULL for i in range(layers))
