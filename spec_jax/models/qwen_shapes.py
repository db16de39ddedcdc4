"""Which tensors a Qwen checkpoint holds: names and shapes, in the layouts that files come in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from spec_jax.models.qwen_config import DELTA, QwenConfig

MTP_LAYER = "mtp.layers.0"

Shapes = dict[str, tuple[int, ...]]


def required_tensors(config: QwenConfig, present: Collection[str] = ()) -> Shapes:
    """The name and shape of every tensor; a tied head is not among them.

    Two parts come in two layouts, of which the names in `present` say which is there; without a sign of one it is
    Qwen3-Next's projections (in_proj_qkvz and in_proj_ba, interleaved by key head) and fused experts.
    """
    hidden = config.hidden_size
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i, (kind, sparse) in enumerate(zip(config.layer_types, config.sparse, strict=True)):
        shapes |= _layer(config, f"model.layers.{i}", kind == DELTA, sparse, present)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes | mtp_tensors(config, present) if config.mtp else shapes


def mtp_tensors(config: QwenConfig, present: Collection[str] = ()) -> Shapes:
    """The same of the MTP head alone."""
    hidden = config.hidden_size
    shapes: Shapes = {"mtp.fc.weight": (hidden, 2 * hidden)}
    shapes |= {f"mtp.{name}.weight": (hidden,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    return shapes | _layer(config, MTP_LAYER, False, config.sparse[-1], present)


def canonical_names(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors of a multimodal checkpoint under the text model's names, without those of the vision tower."""
    prefix = "model.language_model."
    rename = lambda name: "model." + name.removeprefix(prefix) if name.startswith(prefix) else name  # noqa: E731
    return {rename(name): t for name, t in tensors.items() if not name.startswith("model.visual.")}


def fused_experts(layer: str, present: Collection[str]) -> bool:
    """Whether a layer's experts are one tensor per map, rather than tensors of each expert."""
    return f"{layer}.mlp.experts.gate_up_proj" in present or f"{layer}.mlp.experts.0.gate_proj.weight" not in present


def packed_projections(layer: str, present: Collection[str]) -> bool:
    """Whether a gated delta layer's projections are in_proj_qkvz and in_proj_ba, rather than four apart."""
    return f"{layer}.linear_attn.in_proj_qkv.weight" not in present


def layer_norms(config: QwenConfig) -> tuple[str, ...]:
    """The names of a layer's norms: before its mixer and its MLP, and where it has some behind both."""
    if not config.post_norms:
        return "input_layernorm", "post_attention_layernorm"
    before, after = ("input_layernorm", "pre_feedforward_layernorm"), "post_{}_layernorm"
    return *before, *map(after.format, ("attention", "feedforward"))


def _layer(config: QwenConfig, at: str, delta: bool, sparse: bool, present: Collection[str]) -> Shapes:
    norms = {f"{at}.{name}.weight": (config.hidden_size,) for name in layer_norms(config)}
    mixer = _delta(config, at, packed_projections(at, present)) if delta else _attention(config, f"{at}.self_attn")
    mlp = _experts(config, at, fused_experts(at, present)) if sparse else _mlp(config, f"{at}.mlp")
    return norms | mixer | mlp


def _attention(config: QwenConfig, at: str) -> Shapes:
    hidden, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    maps = {"q": (q * (1 + config.output_gate), hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    shapes: Shapes = {f"{at}.{name}_proj.weight": shape for name, shape in maps.items()}
    if config.attention_bias:
        shapes |= {f"{at}.{name}_proj.bias": shape[:1] for name, shape in maps.items()}
    return shapes | {f"{at}.{name}_norm.weight": (config.head_dim,) for name in "qk"}


def _delta(config: QwenConfig, layer: str, packed: bool) -> Shapes:
    at, hidden, heads = f"{layer}.linear_attn", config.hidden_size, config.linear_num_value_heads or 0
    if packed:
        maps = {"qkvz": config.conv_size + config.value_size, "ba": 2 * heads}
    else:
        maps = {"qkv": config.conv_size, "z": config.value_size, "b": heads, "a": heads}
    return {f"{at}.in_proj_{name}.weight": (size, hidden) for name, size in maps.items()} | {
        f"{at}.conv1d.weight": (config.conv_size, 1, config.linear_conv_kernel_dim or 0),
        f"{at}.A_log": (heads,),
        f"{at}.dt_bias": (heads,),
        f"{at}.norm.weight": (config.linear_value_head_dim or 0,),
        f"{at}.out_proj.weight": (hidden, config.value_size),
    }


def _experts(config: QwenConfig, layer: str, fused: bool) -> Shapes:
    at, hidden = f"{layer}.mlp", config.hidden_size
    count, inner = config.num_experts or 0, config.moe_intermediate_size or 0
    shapes: Shapes = {f"{at}.gate.weight": (count, hidden)}
    if fused:
        shapes[f"{at}.experts.gate_up_proj"] = (count, 2 * inner, hidden)
        shapes[f"{at}.experts.down_proj"] = (count, hidden, inner)
    else:
        for i in range(count):
            shapes |= _mlp(config, f"{at}.experts.{i}", inner)
    if config.shared_expert_intermediate_size is not None:
        shapes |= _mlp(config, f"{at}.shared_expert", config.shared_expert_intermediate_size)
        shapes[f"{at}.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _mlp(config: QwenConfig, at: str, inner: int | None = None) -> Shapes:
    hidden, inner = config.hidden_size, inner or config.intermediate_size or 0
    maps = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return {f"{at}.{name}_proj.weight": shape for name, shape in maps.items()}
