"""The sizes of a small Qwen3-Next, and its config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Shape:
    """The fields of transformers' Qwen3NextConfig that the forward pass reads, under its names.

    Every layer has sparse experts with a shared one, every `full_attention_interval`-th mixes by attention, the others
    by gated delta; embedding and head are tied. Raises ValueError for sizes that do not fit together.
    """

    vocab_size: int = 4096
    hidden_size: int = 128
    num_hidden_layers: int = 4
    full_attention_interval: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    partial_rotary_factor: float = 0.5
    rope_theta: float = 10000.0
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 32
    linear_conv_kernel_dim: int = 4
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    shared_expert_intermediate_size: int = 128
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096

    def __post_init__(self) -> None:
        """Check what must divide what."""
        for name, by in (
            ("num_attention_heads", "num_key_value_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
            ("num_hidden_layers", "full_attention_interval"),
        ):
            if getattr(self, name) % getattr(self, by):
                raise ValueError(f"{name}: got {getattr(self, name)}, takes a multiple of {by}, {getattr(self, by)}")
        if self.rotary_dim % 2 or self.rotary_dim < 2:
            raise ValueError(
                f"partial_rotary_factor: got {self.partial_rotary_factor}, takes one that rotates an even number of "
                f"a head's {self.head_dim} dimensions"
            )
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(f"num_experts_per_tok: got {self.num_experts_per_tok}, takes 1 to {self.num_experts}")

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def layer_types(self) -> tuple[str, ...]:
        """What mixes the tokens of each layer."""
        last = self.full_attention_interval - 1
        kinds = ("linear_attention", "full_attention")
        return tuple(kinds[i % self.full_attention_interval == last] for i in range(self.num_hidden_layers))

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> Shape:
        """The shape that `to_hf` wrote."""
        fields = {**fields, **fields["rope_parameters"]}
        return cls(**{field.name: fields[field.name] for field in dataclasses.fields(cls)})

    def to_hf(self, eos_token_id: int) -> dict[str, Any]:
        """The model's config.json."""
        fields = dataclasses.asdict(self)
        rope = {"rope_type": "default"} | {name: fields.pop(name) for name in ("rope_theta", "partial_rotary_factor")}
        return {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            **fields,
            "layer_types": list(self.layer_types),
            "rope_parameters": rope,
            "intermediate_size": self.moe_intermediate_size,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "num_nextn_predict_layers": 1,
            "bos_token_id": None,
            "eos_token_id": eos_token_id,
            "dtype": "float32",
        }
