"""What config.json says of an EAGLE head, in the formats that it comes in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from spec_jax.drafters.eagle.config import EagleConfig, default_taps
from spec_jax.drafters.files import architecture, layer_fields
from spec_jax.drafters.known import check_known, check_off, check_same, check_speculator
from spec_jax.models.config import rope_from_hf
from spec_jax.models.fields import (
    flag_of,
    ids_of,
    number_of,
    object_of,
    read,
    require,
    require_only,
    size_of,
    token_of,
)

SPECULATORS = {"eagle3": "Eagle3", "peagle": "PEagle"}
"""What the names of speculators' own classes begin with, by its types."""

EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Qwen3ForCausalLMEagle3")
EAGLE1 = ("LlamaForCausalLMEagle",)
HEAD, TARGET = "lm_head", "target"
"""Our field that says that the map to logits is the target's, and not in the file."""

_AUX = "eagle_aux_hidden_state_layer_ids"
_NORMS = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
_JOINED = ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm")
_ONCE = ("parallel_draft_step", "parallel_draft_heads_num_layers")


def is_eagle(fields: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE head in a published format."""
    if "speculators_model_type" in fields:
        return fields["speculators_model_type"] in tuple(SPECULATORS)
    return architecture(fields) in EAGLE3 + EAGLE1


def read_config(fields: Mapping[str, Any], names: Collection[str], target: Any) -> tuple[EagleConfig, str]:
    """The head's config, and what the names of its first layer's tensors begin with.

    Layer ids of speculators and vLLM count as our taps do; those of SafeAILab and SGLang, in eagle_config, name the
    layer whose output is read, one less. `names` are the file's tensors, which say whether queries are normed.

    Raises:
        ValueError: naming the field, for what is not known here or does not fit the target's config.
    """
    layer, name = fields, _AUX
    own: dict[str, Any]
    top, usual = "layers.0.", default_taps(target.num_layers)
    if "speculators_model_type" in fields:
        layer = object_of(fields, "transformer_layer_config")
        taps = ids_of(fields, name) or usual
        kind = fields["speculators_model_type"]
        parallel = kind == "peagle"
        known = (*_NORMS, _AUX, "embed_requires_grad", HEAD, *(("mask_token_id",) if parallel else ()))
        check_speculator(fields, SPECULATORS[kind], known)
        twice = ("draft_vocab_size", "target_hidden_size", *_NORMS)
        check_same(fields, {n: layer[n] for n in twice if n in layer}, "transformer_layer_config")
        require_only(fields, (HEAD, None, (None, TARGET)))
        own = {"mask_token": token_of(fields, "mask_token_id", target.vocab_size) if parallel else None}
        own |= {"own_head": fields.get(HEAD) != TARGET}
    elif architecture(fields) in EAGLE1:
        _settings(fields, joined=False)
        require_only(fields, ("tie_word_embeddings", False, (False,)))
        taps, own = (target.num_layers,), {"inputs": "fused", "fc_bias": flag_of(fields, "bias", "fc.bias" in names)}
        own |= {"own_head": "lm_head.weight" in names, "final_norm_eps": target.rms_norm_eps}
    else:
        settings = _settings(fields, joined=True)
        require_only(fields, ("tie_word_embeddings", False, (False,)))
        ids, plain = ids_of(settings, name), ids_of(fields, name)
        require(ids is None or plain is None, name, plain, "one list, in eagle_config or outside")
        taps = plain or (usual if ids is None else tuple(i + 1 for i in ids))
        top, own = "midlayer.", {"own_head": True}
    if own.get("inputs") != "fused":
        each, every = flag_of(fields, "fc_norm"), flag_of(fields, "norm_before_fc")
        require(not (each and every), "fc_norm", each, "false with norm_before_fc")
        own |= {
            "norm_output": flag_of(fields, "norm_output"),
            "norm_before_residual": flag_of(fields, "norm_before_residual"),
            "feature_norm": "each" if each else "all" if every else "none",
        }
    require(max(taps) <= target.num_layers, "layer ids", taps, f"the target's {target.num_layers} layers at most")
    small = size_of(fields, "draft_vocab_size", target.vocab_size)
    own["draft_vocab_size"] = None if small == target.vocab_size else small
    normed = any(f"{top}self_attn.{p}_norm.weight" in names for p in "qk")
    own["qk_norm"] = normed or layer is not fields and layer.get("model_type") == "qwen3"
    config = _network(fields, layer, target, taps=taps, **own)
    flat = (
        (*_JOINED, "next_layer_regular", *(("bias",) if config.inputs == "fused" else _NORMS))
        if layer is fields
        else ()
    )
    check_off(layer, ("attention_bias", *flat))
    return config, top


def _settings(fields: Mapping[str, Any], joined: bool) -> dict[str, Any]:
    """eagle_config, whose settings may say of a head what it is, and no more; `fields`' own of those names as well."""
    settings = object_of(fields, "eagle_config")
    check_known(
        settings,
        (_AUX, *_JOINED, *_ONCE, "next_layer_regular", "use_mtp_layernorm", "parallel_drafting"),
        "eagle_config",
    )
    for given in (settings, fields):
        require_only(
            given,
            ("use_aux_hidden_state", joined, (joined,)),
            *((name, None, (None, joined)) for name in _JOINED[1:]),
            *((name, None, (None, False)) for name in ("use_mtp_layernorm", "parallel_drafting")),
            *((name, None, (None, 0, 1)) for name in _ONCE),
            ("next_layer_regular", None, (None, True)),
            *((name, None, (None,)) for name in ("mask_token_id", "ptd_token_id")),
        )
        require(joined or not given.get(_AUX), _AUX, given.get(_AUX), "none with the last layer's state alone")
    return settings


def steps(fields: Mapping[str, Any], unknown: int = 5) -> int:
    """How many tokens a head drafts by its config, if it says so."""
    methods = read(object_of(fields, "speculators_config"), "proposal_methods", [])
    listed = isinstance(methods, list) and all(isinstance(method, Mapping) for method in methods)
    require(listed, "proposal_methods", methods, "a list of objects")
    return size_of(methods[0] if methods else {}, "speculative_tokens", unknown)


def _network(fields: Mapping[str, Any], layer: Mapping[str, Any], target: Any, **own: Any) -> EagleConfig:
    require_only(
        layer,
        ("model_type", "llama", ("llama", "qwen3")),
        ("hidden_act", "silu", ("silu",)),
        ("mlp_bias", False, (False,)),
        ("quantization_config", None, (None,)),
    )
    for name in ("vocab_size", "hidden_size"):
        want = getattr(target, name)
        require(layer.get(name) == want, name, layer.get(name), f"the target's, {want}")
    kinds = read(layer, "layer_types", [])
    full = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
    require(full, "layer_types", kinds, "'full_attention' in every layer")
    require(not flag_of(layer, "use_sliding_window"), "use_sliding_window", True, "false")
    hidden, heads = size_of(layer, "hidden_size"), size_of(layer, "num_attention_heads")
    layers = target.num_layers
    require_only(fields, ("target_hidden_size", None, (None, hidden)), ("num_target_layers", None, (None, layers)))
    positions = size_of(layer, "max_position_embeddings", 32768)
    standard = 128 if layer.get("model_type") == "qwen3" else hidden // heads
    return EagleConfig(
        vocab_size=target.vocab_size,
        hidden_size=hidden,
        intermediate_size=size_of(layer, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=size_of(layer, "num_key_value_heads", heads),
        head_dim=size_of(layer, "head_dim", standard),
        num_layers=size_of(layer, "num_hidden_layers", 1),
        attention_bias=flag_of(layer, "attention_bias"),
        rms_norm_eps=number_of(layer, "rms_norm_eps", 1e-6),
        rope=rope_from_hf(layer, positions),
        max_position_embeddings=positions,
        **own,
    )


def write_config(config: EagleConfig, target: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """The config.json of a head; `target` has the target's name_or_path and architectures."""
    c = config
    layer = {
        "model_type": "qwen3" if c.qk_norm else "llama",
        **layer_fields(c),
        "attention_bias": c.attention_bias,
    }
    if c.inputs == "fused":
        return layer | {"architectures": list(EAGLE1), "draft_vocab_size": c.logit_size, "bias": c.fc_bias}
    kind = "eagle3" if c.mask_token is None else "peagle"
    fields: dict[str, Any] = {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "architectures": ["Eagle3Speculator" if kind == "eagle3" else "PEagleSpeculator"],
        "transformer_layer_config": layer,
        "draft_vocab_size": c.logit_size,
        "eagle_aux_hidden_state_layer_ids": list(c.taps),
        "norm_before_residual": c.norm_before_residual,
        "norm_output": c.norm_output,
        "fc_norm": c.feature_norm == "each",
        "norm_before_fc": c.feature_norm == "all",
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": steps}],
            "default_proposal_method": "greedy",
            "verifier": dict(target),
        },
    }
    return fields if c.mask_token is None else fields | {"mask_token_id": c.mask_token}
