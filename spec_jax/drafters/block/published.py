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
from spec_jax.drafters.block.kinds import KNOWN, kind_of, speculator_of
from spec_jax.drafters.known import check_known, check_off, check_same
from spec_jax.models.config import rope_from_hf
from spec_jax.models.fields import (
    count_of,
    first_windowed,
    flag_of,
    ids_of,
    kinds_of,
    number_of,
    object_of,
    read,
    require,
    require_only,
    size_of,
    token_of,
)

_SWITCHES = ("is_causal", "attention_bias", "use_sliding_window")


def read_config(fields: Mapping[str, Any], vocab_size: int, target_layers: int) -> tuple[str, BlockConfig, Head]:
    """The kind, the network and the head that a config.json in the z-lab, DSpark, JetSpec or Domino form describes.

    Raises ValueError, naming the field, for fields that belong to another kind than the architecture, that would make
    another network, that contradict each other, or that are not known.
    """
    own: dict[str, Any] = {}
    for where in ("dflash_config", "treeflash_config"):
        inside = object_of(fields, where)
        check_known(inside, KNOWN, where)
        check_same({**fields, **own}, inside, where)
        own |= inside
    every = {**fields, **{name: value for name, value in own.items() if value is not None}}
    kind = kind_of(every)
    layers = size_of(fields, "num_hidden_layers")
    kinds = _layer_types(fields, layers)
    told, head = _told(fields, "is_causal"), _told(every, "causal_head")
    require(told is None or head is None or told == head, "causal_head", head, f"what is_causal says, {told}")
    causal = causal_layers(kinds, True if head else told)
    shifts = [_told(every, name) for name in ("shift_label", "draft_shift")] + [True if kind == "dspark" else None]
    require(not {True, False} <= {*shifts}, "draft_shift", every.get("draft_shift"), "what the other fields say")
    ids = ids_of(every, "target_layer_ids")
    made_for = size_of(every, "num_target_layers", target_layers)
    require(made_for == target_layers, "num_target_layers", made_for, f"the target's, {target_layers}")
    config = _network(
        fields,
        every,
        vocab_size,
        layer_types=kinds,
        causal=causal,
        taps=default_taps(target_layers, layers) if ids is None else tuple(i + 1 for i in ids),
        slots="shifted" if any(shifts) else "fill_in",
        block_size=size_of(every, "block_size", 16),
        conv_kernel_size=size_of(every, "conv_kernel_size") if kind == "dflash2" else None,
        conv_group_size=size_of(every, "conv_group_size", 16) if kind == "dflash2" else None,
    )
    check_off(fields, {*KNOWN, *_SWITCHES})
    return kind, config, _head(kind, every)


def read_speculators(fields: Mapping[str, Any], vocab_size: int) -> tuple[str, BlockConfig, Head]:
    """The same of the speculators format, whose layer ids count as our taps do."""
    kind = speculator_of(fields)
    layer = object_of(fields, "transformer_layer_config")
    check_same(fields, {name: layer[name] for name in KNOWN & layer.keys()}, "transformer_layer_config")
    layers = size_of(layer, "num_hidden_layers")
    kinds = _layer_types(layer, layers)
    ids, named = ids_of(fields, "aux_hidden_state_layer_ids"), "aux_hidden_state_layer_ids"
    require(ids is not None, named, ids, "a list of ids")
    bidirectional = flag_of(fields, "sliding_window_non_causal", kind == "dflash2")
    causal, told = causal_layers(kinds, False if bidirectional else None), _told(layer, "is_causal")
    fits = told is None or causal == causal_layers(kinds, told)
    require(fits, "is_causal", told, "what sliding_window_non_causal says of every layer")
    small = size_of(fields, "draft_vocab_size", vocab_size)
    config = _network(
        layer,
        fields,
        vocab_size,
        layer_types=kinds,
        causal=causal,
        taps=ids,
        slots="shifted" if flag_of(fields, "sample_from_anchor", kind == "dspark") else "fill_in",
        block_size=size_of(fields, "block_size", 8),
        conv_kernel_size=size_of(fields, "conv_kernel_size", 2) if kind == "dflash2" else None,
        conv_group_size=size_of(fields, "conv_group_size", 16) if kind == "dflash2" else None,
        draft_vocab_size=None if small == vocab_size else small,
    )
    check_off(layer, _SWITCHES)
    return kind, config, _head(kind, fields)


def _told(fields: Mapping[str, Any], name: str) -> bool | None:
    return None if fields.get(name) is None else flag_of(fields, name)


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
