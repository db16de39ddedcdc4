"""What config.json says of an EAGLE head, in the formats that it comes in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from spec_jax.drafters.eagle.config import EagleConfig, default_taps
from spec_jax.drafters.files import layer_fields
from spec_jax.models.config import is_size, require, rope_from_hf

SPECULATORS = ("eagle3", "peagle")
EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Qwen3ForCausalLMEagle3")
EAGLE1 = ("LlamaForCausalLMEagle",)
HEAD, TARGET = "lm_head", "target"
"""Our field that says that the map to logits is the target's, and not in the file."""


def is_eagle(fields: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE head in a published format."""
    if "speculators_model_type" in fields:
        return fields["speculators_model_type"] in SPECULATORS
    return (fields.get("architectures") or [None])[0] in EAGLE3 + EAGLE1


def read_config(fields: Mapping[str, Any], names: Collection[str], target: Any) -> tuple[EagleConfig, str]:
    """The head's config, and what the names of its first layer's tensors begin with.

    Layer ids of speculators and vLLM count as our taps do; those of SafeAILab and SGLang, in eagle_config, name the
    layer whose output is read, one less. `names` are the file's tensors, which say whether queries are normed.

    Raises:
        ValueError: naming the field, for what is not known here or does not fit the target's config.
    """
    layer: Any = fields
    own: dict[str, Any]
    top = "layers.0."
    if "speculators_model_type" in fields:
        layer = fields.get("transformer_layer_config")
        require(isinstance(layer, Mapping), "transformer_layer_config", layer, "an object")
        ids = fields.get("eagle_aux_hidden_state_layer_ids")
        require(ids is None or isinstance(ids, list), "eagle_aux_hidden_state_layer_ids", ids, "a list of ids")
        taps = default_taps(target.num_layers) if ids is None else tuple(ids)
        parallel = fields["speculators_model_type"] == "peagle"
        mask = fields.get("mask_token_id") if parallel else None
        require(not parallel or mask is not None, "mask_token_id", mask, "a token id")
        require(fields.get(HEAD) in (None, TARGET), HEAD, fields.get(HEAD), repr(TARGET))
        own = {"mask_token": mask, "own_head": fields.get(HEAD) != TARGET}
    elif fields["architectures"][0] in EAGLE1:
        require(fields.get("tie_word_embeddings", False) is False, "tie_word_embeddings", True, "false")
        taps, own = (target.num_layers,), {"inputs": "fused", "fc_bias": fields.get("bias", "fc.bias" in names)}
        own |= {"own_head": "lm_head.weight" in names, "final_norm_eps": target.rms_norm_eps}
    else:
        require(fields.get("tie_word_embeddings", False) is False, "tie_word_embeddings", True, "false")
        settings = fields.get("eagle_config") or {}
        require(settings.get("use_aux_hidden_state", True) is True, "use_aux_hidden_state", False, "true")
        name = "eagle_aux_hidden_state_layer_ids"
        ids, plain = settings.get(name), fields.get(name)
        require(ids is None or plain is None, name, plain, "one list, in eagle_config or outside")
        taps = default_taps(target.num_layers) if ids is None else tuple(i + 1 for i in ids)
        taps = taps if plain is None else tuple(plain)
        top, own = "midlayer.", {"own_head": True}
    if own.get("inputs") != "fused":
        each, every = fields.get("fc_norm") or False, fields.get("norm_before_fc") or False
        require(not (each and every), "fc_norm", each, "false with norm_before_fc")
        own |= {
            "norm_output": fields.get("norm_output") or False,
            "norm_before_residual": fields.get("norm_before_residual") or False,
            "feature_norm": "each" if each else "all" if every else "none",
        }
    require(max(taps) <= target.num_layers, "layer ids", taps, f"the target's {target.num_layers} layers at most")
    small = fields.get("draft_vocab_size") or target.vocab_size
    own["draft_vocab_size"] = None if small == target.vocab_size else small
    normed = any(f"{top}self_attn.{p}_norm.weight" in names for p in "qk")
    own["qk_norm"] = normed or layer is not fields and layer.get("model_type") == "qwen3"
    return _network(fields, layer, target, taps=taps, **own), top


def steps(fields: Mapping[str, Any], unknown: int = 5) -> int:
    """How many tokens a head drafts by its config, if it says so."""
    methods = (fields.get("speculators_config") or {}).get("proposal_methods") or [{}]
    got = methods[0].get("speculative_tokens", unknown)
    return _size("speculative_tokens", got)


def _network(fields: Mapping[str, Any], layer: Mapping[str, Any], target: Any, **own: Any) -> EagleConfig:
    for name, default, taken in (
        ("model_type", "llama", ("llama", "qwen3")),
        ("hidden_act", "silu", ("silu",)),
        ("mlp_bias", False, (False,)),
        ("quantization_config", None, (None,)),
    ):
        got = layer.get(name, default)
        require(got in taken, name, got, " or ".join(map(repr, taken)))
    kinds = layer.get("layer_types") or []
    require(all(kind == "full_attention" for kind in kinds), "layer_types", kinds, "'full_attention' in every layer")
    windowed = layer.get("use_sliding_window", False)
    require(not windowed, "use_sliding_window", windowed, "false")
    sizes = {n: _size(n, layer.get(n)) for n in ("hidden_size", "intermediate_size", "num_attention_heads")}
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    for name, want in (("vocab_size", target.vocab_size), ("hidden_size", target.hidden_size)):
        require(layer.get(name) == want, name, layer.get(name), f"the target's, {want}")
    wide = fields.get("target_hidden_size")
    require(wide in (None, hidden), "target_hidden_size", wide, f"hidden_size, {hidden}")
    positions = _size("max_position_embeddings", layer.get("max_position_embeddings", 32768))
    standard = 128 if layer.get("model_type") == "qwen3" else hidden // heads
    return EagleConfig(
        vocab_size=target.vocab_size,
        hidden_size=hidden,
        intermediate_size=sizes["intermediate_size"],
        num_heads=heads,
        num_kv_heads=_size("num_key_value_heads", layer.get("num_key_value_heads") or heads),
        head_dim=_size("head_dim", layer.get("head_dim") or standard),
        num_layers=_size("num_hidden_layers", layer.get("num_hidden_layers", 1)),
        attention_bias=layer.get("attention_bias", False),
        rms_norm_eps=layer.get("rms_norm_eps", 1e-6),
        rope=rope_from_hf(layer, positions),
        max_position_embeddings=positions,
        **own,
    )


def _size(name: str, value: Any) -> int:
    require(is_size(value), name, value, "a positive integer")
    return int(value)


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
