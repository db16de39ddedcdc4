"""Tunix's Llama 3, Qwen 2 / 2.5 and Qwen 3 as targets: their arrays as they are, read in another order.

Nothing is copied: a leaf holds the arrays of the flax module and reshapes them where they are used, inside the program.
Nothing of Tunix is imported here; a module is known by its class name and its `config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from spec_jax.models import llama, qwen
from spec_jax.models.config import LlamaConfig, RopeConfig
from spec_jax.models.experts import Mlp
from spec_jax.models.gated_attention import Attention
from spec_jax.models.linear import Projection, RowEmbedding
from spec_jax.models.llama import Llama, LlamaParams
from spec_jax.models.qwen import Qwen, QwenParams
from spec_jax.models.qwen_config import ATTENTION, QwenConfig

FAMILIES = ("Llama3", "Qwen2", "Qwen3")
_LONGEST = 2**17


def target_for(model: Any, theta: float | None = None) -> Llama | Qwen:
    """The target of a Tunix model's family and sizes.

    theta: base of the rotary embedding; None takes the config's. (Tunix 0.1.7's Llama 3 rotates by 1,000,000 whatever
    its config says; `tunix.SpecRollout` finds out which by comparing logits.)

    Raises:
        ValueError: for another family, or sparse experts, whose kernels can't be read in place.
    """
    family, c = type(model).__name__, getattr(model, "config", None)
    if family not in FAMILIES or c is None:
        raise ValueError(f"model: got a {family}, takes one of Tunix's {', '.join(FAMILIES)}")
    if getattr(c, "num_experts", None):
        raise ValueError(f"model: got a {family} of {c.num_experts} experts, takes a dense one")
    rope = RopeConfig(theta=float(c.rope_theta if theta is None else theta))
    sizes: dict[str, Any] = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.embed_dim,
        "intermediate_size": c.hidden_dim,
        "num_heads": c.num_heads,
        "num_kv_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": float(c.norm_eps),
        "rope": rope,
        "max_position_embeddings": _LONGEST,
        "tie_word_embeddings": _tied(c),
    }
    if family == "Qwen3":
        return Qwen(QwenConfig(layer_types=(ATTENTION,) * c.num_layers, sparse=(False,) * c.num_layers, **sizes))
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
        ValueError: for LoRA pairs without their scale.
    """
    c, family = model.config, type(model).__name__
    table = state["embedder"]["input_embedding"]
    if dtype is None:
        dtype = getattr(c, "dtype", table.dtype)
    if lora_scale is None and any("lora" in str(path) for path, _ in jax.tree.flatten_with_path(state)[0]):
        raise ValueError("lora_scale: got None for a model with LoRA parameters, takes alpha / rank")

    def linear(leaf: Mapping[str, Any], inputs: int = 1, bias: Array | None = None) -> Projection:
        name = "kernel" if "kernel" in leaf else "w"
        pair = {"a": leaf.get(f"{name}_lora_a"), "b": leaf.get(f"{name}_lora_b")}
        return Projection(leaf[name], leaf.get("bias", bias), **pair, inputs=inputs, scale=lora_scale or 0.0)

    def layer(own: Mapping[str, Any]) -> Any:
        a, m = own["attn"], own["mlp"]
        maps = {n: linear(a[f"{n}_proj"], bias=a.get(f"{n}_bias")) for n in "qkv"}
        maps["o"] = linear(a["o_proj"], inputs=2)
        mlp = {n: linear(m[f"{n}_proj"]) for n in ("gate", "up", "down")}
        norms = own["input_layernorm"]["w"], own["post_attention_layernorm"]["w"]
        if family == "Qwen3":
            attention: Any = Attention(**maps, q_norm=a["q_norm"]["w"], k_norm=a["k_norm"]["w"])
            return qwen.Layer(mixer_norm=norms[0], mixer=attention, mlp_norm=norms[1], mlp=Mlp(**mlp))
        return llama.Layer(attention_norm=norms[0], **maps, mlp_norm=norms[1], **mlp)

    layers = tuple(layer(state["layers"][i]) for i in sorted(state["layers"], key=int))
    head: Any = None if _tied(c) else linear(state["lm_head"])
    embedding: Any = RowEmbedding(table, jnp.dtype(dtype))
    kind = QwenParams if family == "Qwen3" else LlamaParams
    return kind(embedding=embedding, layers=layers, norm=state["final_norm"]["w"], head=head)


def _tied(config: Any) -> bool:
    return bool(getattr(config, "weight_tying", False) or getattr(config, "use_tied_embedding", False))
