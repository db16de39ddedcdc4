"""Published block drafters' config.json: what network, head and slots it means, in every format that is out there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_jax.drafters.block.config import FULL, SLIDING, BlockConfig, causal_layers, default_taps
from spec_jax.drafters.block.heads.gru import Domino
from spec_jax.drafters.block.heads.head import Head, Plain
from spec_jax.drafters.block.heads.jacobi import Jacobi
from spec_jax.drafters.block.heads.markov import Markov
from spec_jax.drafters.block.heads.selector import Selector
from spec_jax.drafters.block.heads.swiglu import SwiGlu
from spec_jax.models.config import is_size, require, rope_from_hf

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
    own = fields.get("dflash_config") or {}
    require(isinstance(own, Mapping), "dflash_config", own, "an object")
    own = dict(own) | dict(fields.get("treeflash_config") or {})
    if unknown := own.keys() - _KNOWN:
        raise ValueError(f"dflash_config has {', '.join(sorted(unknown))}; taken: {', '.join(sorted(_KNOWN))}")
    get = lambda name, default=None: own[name] if own.get(name) is not None else fields.get(name, default)  # noqa: E731
    kind = _kind(fields, get)
    layers = _size("num_hidden_layers", fields.get("num_hidden_layers"))
    kinds = _layer_types(fields, layers)
    causal = causal_layers(kinds, fields.get("is_causal"))
    if get("causal_head"):
        causal = (True,) * layers
    slots = "shifted" if kind == "dspark" or get("shift_label") or get("draft_shift") else "fill_in"
    ids = get("target_layer_ids")
    taps = default_taps(int(get("num_target_layers") or target_layers), layers)
    if ids is not None:
        listed = isinstance(ids, list) and all(isinstance(i, int) for i in ids)
        require(listed, "target_layer_ids", ids, "a list of ids")
        taps = tuple(i + 1 for i in ids)
    config = _network(
        fields,
        get,
        vocab_size,
        layer_types=kinds,
        causal=causal,
        taps=taps,
        slots=slots,
        block_size=get("block_size", 16),
        conv_kernel_size=get("conv_kernel_size") if kind == "dflash2" else None,
        conv_group_size=get("conv_group_size", 16) if kind == "dflash2" else None,
    )
    return kind, config, _head(kind, get)


def read_speculators(fields: Mapping[str, Any], vocab_size: int) -> tuple[str, BlockConfig, Head]:
    """The same of the speculators format, whose layer ids count as our taps do."""
    kind = fields.get("speculators_model_type")
    require(kind in SPECULATORS, "speculators_model_type", kind, ", ".join(SPECULATORS))
    layer = fields.get("transformer_layer_config")
    require(isinstance(layer, Mapping), "transformer_layer_config", layer, "an object")
    layer = dict(layer or {})
    layers = _size("num_hidden_layers", layer.get("num_hidden_layers"))
    kinds = _layer_types(layer, layers)
    ids = fields.get("aux_hidden_state_layer_ids")
    require(isinstance(ids, list) and bool(ids), "aux_hidden_state_layer_ids", ids, "a list of ids")
    bidirectional = fields.get("sliding_window_non_causal", kind == "dflash2")
    small = fields.get("draft_vocab_size", vocab_size)
    config = _network(
        layer,
        lambda name, default=None: fields.get(name, default),
        vocab_size,
        layer_types=kinds,
        causal=causal_layers(kinds, False if bidirectional else None),
        taps=tuple(ids or ()),
        slots="shifted" if fields.get("sample_from_anchor", kind == "dspark") else "fill_in",
        block_size=fields.get("block_size", 8),
        conv_kernel_size=fields.get("conv_kernel_size", 2) if kind == "dflash2" else None,
        conv_group_size=fields.get("conv_group_size", 16) if kind == "dflash2" else None,
        draft_vocab_size=None if small == vocab_size else small,
    )
    return str(kind), config, _head(str(kind), lambda name, default=None: fields.get(name, default))


def _kind(fields: Mapping[str, Any], get: Any) -> str:
    names = fields.get("architectures") or []
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    require(isinstance(name, str) and name in ARCHITECTURES, "architectures", names, ", ".join(ARCHITECTURES))
    kind, projector = ARCHITECTURES[str(name)], get("projector_type")
    require(projector in _PROJECTORS, "projector_type", projector, ", ".join(map(str, _PROJECTORS)))
    named = _PROJECTORS[projector]
    if kind == "dflash" and named is None and get("markov_rank") is not None:
        named = "dspark"  # some uploads carry DFlash's architecture
    if named is not None:
        require(kind in ("dflash", named), "projector_type", projector, f"one that goes with architectures {name}")
        kind = named
    for other, own in _ONLY.items():
        for field in own:
            if other != kind and field != "num_anchors" and get(field) is not None:
                raise ValueError(f"{field} is {get(field)!r} with architectures {name}; taken with {other} alone")
    if kind == "dflash2":
        for field in ("conv_kernel_size", "selector_rank"):
            require(is_size(get(field)), field, get(field), "a positive integer with DFlash 2")
    return kind


def _head(kind: str, get: Any) -> Head:
    if kind == "dspark":
        sure = get("enable_confidence_head", True)
        with_markov = get("confidence_head_with_markov", True)
        confidence = ("markov" if with_markov else "hidden") if sure else None
        return Markov(get("markov_rank", 256), get("markov_head_type", "vanilla"), confidence)
    if kind == "domino":
        return Domino(get("gru_hidden_dim", 1024), get("emb_dim", 256), get("pure_draft_prefix_len", 1))
    if kind == "dflash2":
        return Selector(get("selector_rank", 256), get("selector_top_k", 16))
    if kind == "xpress":
        return Jacobi(get("xpress_rank", 256), get("xpress_mlp_ratio", 2), get("num_jacobi_passes", 6))
    if kind == "treeflash":
        require(get("ar_approximation") == "swiglu", "ar_approximation", get("ar_approximation"), "swiglu")
        return SwiGlu(1)  # its size stands in the tensors alone
    return Plain()


def _network(fields: Mapping[str, Any], get: Any, vocab_size: int, **own: Any) -> BlockConfig:
    for name, default, taken in (
        ("model_type", "qwen3", ("qwen3",)),
        ("hidden_act", "silu", ("silu",)),
        ("attention_bias", False, (False,)),
        ("quantization_config", None, (None,)),
        ("hidden_dim_adapter", None, (None, False)),
    ):
        require(fields.get(name, default) in taken, name, fields.get(name, default), " or ".join(map(repr, taken)))
    require(fields.get("vocab_size", vocab_size) == vocab_size, "vocab_size", fields.get("vocab_size"), str(vocab_size))
    sizes = {n: _size(n, fields.get(n)) for n in ("hidden_size", "intermediate_size", "num_attention_heads")}
    hidden = sizes["hidden_size"]
    wide = get("target_hidden_size")
    require(wide in (None, hidden), "target_hidden_size", wide, f"hidden_size, {hidden}")
    mask = get("mask_token_id")
    require(isinstance(mask, int), "mask_token_id", mask, "a token id")
    positions = _size("max_position_embeddings", fields.get("max_position_embeddings", 32768))
    cap = get("final_logit_softcapping")
    return BlockConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=sizes["intermediate_size"],
        num_heads=sizes["num_attention_heads"],
        num_kv_heads=_size("num_key_value_heads", fields.get("num_key_value_heads") or sizes["num_attention_heads"]),
        head_dim=_size("head_dim", fields.get("head_dim") or 128),
        mask_token=mask,
        sliding_window=fields.get("sliding_window") if SLIDING in own["layer_types"] else None,
        rms_norm_eps=fields.get("rms_norm_eps", 1e-6),
        rope=rope_from_hf(fields, positions),
        max_position_embeddings=positions,
        embedding_scale=float(get("input_embedding_scale") or 1.0),
        output_multiplier=float(get("output_multiplier") or 1.0),
        softcap=float(cap) if cap else None,
        **own,
    )


def _layer_types(fields: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    kinds = fields.get("layer_types")
    if kinds is None:
        windowed = fields.get("use_sliding_window", False) and fields.get("sliding_window") is not None
        first = fields.get("max_window_layers", 28)
        kinds = [SLIDING if windowed and i >= first else FULL for i in range(layers)]
    require(isinstance(kinds, list) and len(kinds) == layers, "layer_types", kinds, f"a list of {layers} layers' kinds")
    return tuple(kinds)


def _size(name: str, value: Any) -> int:
    require(is_size(value), name, value, "a positive integer")
    return int(value)
