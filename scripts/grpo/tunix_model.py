"""The toy in Tunix: its tokenizer and its Qwen 3 with the same parameters."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from spec_jax.models.qwen import QwenParams
from spec_jax.models.qwen_config import QwenConfig

from .policy import END, LETTERS


class Letters:
    """The toy's tokenizer, as Tunix asks for one; it has no beginning-of-sequence token."""

    def encode(self, text: str, **_: Any) -> list[int]:
        """A token per letter."""
        return [LETTERS.index(c) for c in text]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """The letters of tokens; those that are none are left out."""
        return "".join(LETTERS[i] for i in ids if i < END)

    def bos_id(self) -> int:
        """None."""
        return 0

    def eos_id(self) -> int:
        """The end."""
        return END

    def pad_id(self) -> int:
        """Behind the end."""
        return END + 1


def model_of(config: QwenConfig, params: QwenParams) -> Any:
    """Tunix's Qwen 3 with copies of the parameters; its rotary base is 1,000,000 (0.1.7 reads no other)."""
    from tunix.models.qwen3 import model as qwen3

    sizes = {
        "num_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "embed_dim": config.hidden_size,
        "hidden_dim": config.intermediate_size,
        "num_heads": config.num_heads,
        "head_dim": config.head_dim,
        "num_kv_heads": config.num_kv_heads,
        "rope_theta": int(config.rope.theta),
        "norm_eps": config.rms_norm_eps,
    }
    model = qwen3.Qwen3(qwen3.ModelConfig(**sizes), rngs=nnx.Rngs(0))
    tree: Any = params
    layers = {}
    for i, layer in enumerate(tree.layers):
        a, m = layer.mixer, layer.mlp
        maps = {f"{n}_proj": {"w": getattr(a, n).kernel} for n in "qkvo"}
        layers[i] = {
            "input_layernorm": {"w": layer.mixer_norm},
            "post_attention_layernorm": {"w": layer.mlp_norm},
            "attn": maps | {"q_norm": {"w": a.q_norm}, "k_norm": {"w": a.k_norm}},
            "mlp": {f"{n}_proj": {"kernel": getattr(m, n).kernel} for n in ("gate", "up", "down")},
        }
    new = {
        "embedder": {"input_embedding": tree.embedding.T},
        "layers": layers,
        "final_norm": {"w": tree.norm},
        "lm_head": {"w": tree.head.kernel},
    }
    state = nnx.state(model, nnx.Param)
    old = nnx.to_pure_dict(state)
    nnx.replace_by_pure_dict(state, jax.tree.map(lambda x, y: jnp.array(y.reshape(x.shape)), old, new))
    nnx.update(model, state)
    return model
