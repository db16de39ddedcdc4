"""Tunix's Llama 3, Qwen 2 / 2.5, Qwen 3 and Gemma 3 as targets: their arrays as they are, read in another order.

Nothing is copied: a leaf holds the arrays of the flax module and reshapes them where they are used, inside the program.
Nothing of Tunix is imported here; a module is known by its class name and its `config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from spec_jax.models import gemma_config, llama, qwen
from spec_jax.models.config import LlamaConfig, RopeConfig
from spec_jax.models.experts import Experts, Mlp
from spec_jax.models.gated_attention import Attention
from spec_jax.models.linear import ByHead, Projection, RowEmbedding
from spec_jax.models.llama import Llama, LlamaParams
from spec_jax.models.norms import OnePlus
from spec_jax.models.qwen import Qwen, QwenParams
from spec_jax.models.qwen_config import ATTENTION, QwenConfig

FAMILIES = ("Llama3", "Qwen2", "Qwen3", "Gemma3")
_LONGEST = 2**17
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "embed_dim",
    "intermediate_size": "hidden_dim",
    "num_heads": "num_heads",
    "num_kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
}
"""Ours and Tunix's names of a config's sizes."""
TIED = {"Llama3": "weight_tying", "Qwen2": "use_tied_embedding", "Qwen3": "use_tied_embedding"}
"""By family, what says that the embedding is the head as well. (A Gemma's always is.)"""


def target_for(model: Any, theta: float | None = None) -> Llama | Qwen:
    """The target of a Tunix model's family and sizes.

    theta: base of the rotary embedding; None takes the config's. (Tunix 0.1.7's Llama 3 and Qwen 3 rotate by
    1,000,000 whatever their config says; `tunix.SpecRollout` finds out which by comparing logits.)

    Raises:
        ValueError: for another family.
    """
    family, c = type(model).__name__, getattr(model, "config", None)
    if family not in FAMILIES or c is None:
        raise ValueError(f"model: got a {family}, takes one of Tunix's {', '.join(FAMILIES)}")
    if family == "Gemma3":
        return Qwen(_gemma(c))
    rope = RopeConfig(theta=float(c.rope_theta if theta is None else theta))
    sizes: dict[str, Any] = {ours: getattr(c, theirs) for ours, theirs in SIZES.items()} | {
        "rope": rope,
        "max_position_embeddings": _LONGEST,
        "tie_word_embeddings": _tied(c),
    }
    if family == "Qwen3":
        if sparse := bool(getattr(c, "num_experts", None)):
            sizes |= {"num_experts": c.num_experts, "num_experts_per_tok": c.num_experts_per_tok}
            sizes |= {"moe_intermediate_size": sizes.pop("intermediate_size")}
        kinds = {"layer_types": (ATTENTION,) * c.num_layers, "sparse": (sparse,) * c.num_layers}
        return Qwen(QwenConfig(**kinds, **sizes))
    return Llama(LlamaConfig(num_layers=c.num_layers, attention_bias=family == "Qwen2", **sizes))


def params_of(
    model: Any, state: Mapping[str, Any], lora_scale: float | None = None, dtype: Any = None
) -> LlamaParams | QwenParams:
    """The target's parameters out of a model's state as a pure dict (`nnx.to_pure_dict(nnx.state(model, nnx.Param))`).

    Args:
        model: the model, for its family and config.
        state: its parameters.
        lora_scale: alpha / rank of its LoRA pairs, which the state does not tell.
        dtype: that of activations; None takes the config's, or that of the embedding.

    Raises:
        ValueError: for LoRA pairs without their scale, or of experts or of a Gemma's queries, keys and values.
    """
    c, family = model.config, type(model).__name__
    gemma = family == "Gemma3"
    table = state["embedder"]["input_embedding"]
    if dtype is None:
        dtype = getattr(c, "dtype", table.dtype)
    if lora_scale is None and any("lora" in str(path) for path, _ in jax.tree.flatten_with_path(state)[0]):
        raise ValueError("lora_scale: got None for a model with LoRA parameters, takes alpha / rank")

    def linear(leaf: Mapping[str, Any], inputs: int = 1, bias: Array | None = None) -> Projection:
        name = "kernel" if "kernel" in leaf else "w"
        pair = {"a": leaf.get(f"{name}_lora_a"), "b": leaf.get(f"{name}_lora_b")}
        return Projection(leaf[name], leaf.get("bias", bias), **pair, inputs=inputs, scale=lora_scale or 0.0)

    def experts(m: Mapping[str, Any]) -> Experts:
        names = ("gate_proj", "up_proj", "down_proj")
        if more := {*m, *m["router"]} - {*names, "router", "kernel"}:
            raise ValueError(f"model: got experts with {', '.join(sorted(more))}, takes ones without LoRA parameters")
        return Experts(m["router"]["kernel"], *(m[name] for name in names))

    def by_head(leaf: Mapping[str, Any], part: int | None = None) -> Any:
        if "w_lora_a" in leaf:
            raise ValueError("model: got a Gemma3 with LoRA pairs of its queries, keys or values, takes one without")
        return ByHead(leaf["w"], part)

    def gemma_layer(own: Mapping[str, Any]) -> qwen.Layer:
        a, m = own["attn"], own["mlp"]
        if "qkv_einsum" in a:
            q, k, v = (by_head(a["qkv_einsum"], i) for i in range(3))
        else:
            q, (k, v) = by_head(a["q_einsum"]), (by_head(a["kv_einsum"], i) for i in range(2))
        norms = OnePlus(a["_query_norm"]["scale"]), OnePlus(a["_key_norm"]["scale"])
        attention: Any = Attention(q, k, v, linear(a["attn_vec_einsum"], inputs=2), *norms)
        gate, up, down = (linear(m[f"{n}_proj"]) for n in ("gate", "up", "down"))
        norm = lambda name: OnePlus(own[name]["scale"])  # noqa: E731
        before, after = ("pre_attention_norm", "pre_ffw_norm"), ("post_attention_norm", "post_ffw_norm")
        mlp = Mlp(gate, up, down, gelu=True)
        return qwen.Layer(norm(before[0]), attention, norm(before[1]), mlp, *map(norm, after))

    def layer(own: Mapping[str, Any]) -> Any:
        if gemma:
            return gemma_layer(own)
        a, m = own["attn"], own["mlp"]
        maps = {n: linear(a[f"{n}_proj"], bias=a.get(f"{n}_bias")) for n in "qkv"}
        maps["o"] = linear(a["o_proj"], inputs=2)
        dense: Any = {} if "router" in m else {n: linear(m[f"{n}_proj"]) for n in ("gate", "up", "down")}
        norms = own["input_layernorm"]["w"], own["post_attention_layernorm"]["w"]
        if family == "Qwen3":
            attention: Any = Attention(**maps, q_norm=a["q_norm"]["w"], k_norm=a["k_norm"]["w"])
            mlp = Mlp(**dense) if dense else experts(m)
            return qwen.Layer(mixer_norm=norms[0], mixer=attention, mlp_norm=norms[1], mlp=mlp)
        return llama.Layer(attention_norm=norms[0], **maps, mlp_norm=norms[1], **dense)

    each = tuple(layer(state["layers"][i]) for i in sorted(state["layers"], key=int))
    head: Any = None if gemma or _tied(c) else linear(state["lm_head"])
    embedding: Any = RowEmbedding(table, jnp.dtype(dtype))
    kind = QwenParams if family in ("Qwen3", "Gemma3") else LlamaParams
    norm: Any = OnePlus(state["final_norm"]["scale"]) if gemma else state["final_norm"]["w"]
    return kind(embedding=embedding, layers=each, norm=norm, head=head)


def _gemma(c: Any) -> QwenConfig:
    """The config of a Tunix Gemma 3; ValueError for one with a vision tower."""
    if c.vision_config is not None:
        raise ValueError("model: got a Gemma3 with a vision tower, takes a text model")

    def rope(theta: float, factor: float) -> RopeConfig:
        return RopeConfig(theta=float(theta), **({} if factor == 1 else {"type": "linear", "factor": float(factor)}))

    scalar = c.head_dim if c.query_pre_attn_norm.name == "BY_ONE_OVER_SQRT_HEAD_DIM" else c.embed_dim // c.num_heads
    return QwenConfig(
        vocab_size=c.num_embed,
        hidden_size=c.embed_dim,
        intermediate_size=c.hidden_dim,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        layer_types=gemma_config.layer_types(c.num_layers),
        sparse=(False,) * c.num_layers,
        rms_norm_eps=1e-6,
        rope=rope(c.global_base_frequency, c.global_scale_factor),
        local_rope=rope(c.local_base_frequency, c.local_scale_factor),
        max_position_embeddings=_LONGEST,
        sliding_window=c.sliding_window_size,
        query_scale=scalar**-0.5,
        **gemma_config.SETTINGS,
    )


def _tied(config: Any) -> bool:
    return any(getattr(config, name, False) for name in TIED.values())
