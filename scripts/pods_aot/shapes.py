"""The published models and pods that aot_pod.py compiles for, with where each number is from."""

from __future__ import annotations

import dataclasses
from typing import Any

from spec_jax.models.qwen_config import QwenConfig

NODES = (1, 2, 4, 8, 16, 32, 64)

# Sizes are those of public launch scripts, which name them as Megatron does:
#   Qwen3-8B, Qwen3-235B-A22B: qwen3-8B.sh, qwen3-235B-A22B.sh in scripts/models, github.com/vllm-project/vime b332ffc;
#   Qwen3.5-397B-A17B: scripts/models/qwen3.5-397B-A17B.sh of github.com/THUDM/slime (aa84536); its gated delta layers'
#   heads, which that leaves out: NVIDIA Megatron-LM's MIMO example of the same model, "all values match text_config".
# 16 key heads, heads of 128 and a convolution over 4 are transformers 5.24's defaults of Qwen3_5MoeTextConfig as well.
_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "head_dim": 128,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": _QWEN3
    | {
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
    },
    "Qwen3-235B-A22B": _QWEN3
    | {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "norm_topk_prob": True,
    },
    "Qwen3.5-397B-A17B": {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 248320,
        "hidden_size": 4096,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 64,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "max_position_embeddings": 262144,
    },
    "tiny": {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 1024,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "full_attention_interval": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 4096,
    },
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on a topology: the mesh's axes, rows over all chips, slots of a row's text, and the drafter.

    drafter: "prompt_lookup", a chain whose draft costs next to nothing, so that the curve is the target's; or "mtp",
    the model's own head, which grows a tree three levels deep.
    """

    name: str
    topology: str
    data: int
    expert: int
    tensor: int
    batch: int
    context: int = 4096
    drafter: str = "prompt_lookup"

    @property
    def key(self) -> str:
        """What it is called in tables."""
        return f"{self.name} {self.topology}"

    @property
    def config(self) -> QwenConfig:
        """The model's; with the MTP head where that drafts."""
        return dataclasses.replace(QwenConfig.from_hf(MODELS[self.model]), mtp=self.drafter == "mtp")

    @property
    def model(self) -> str:
        """The model's name in MODELS."""
        return self.name.removesuffix("+MTP")


# Rows per chip group and context are chosen so that caches and weights fit with room to spare; see docs/pods_cost.md.
CASES = (
    Case("Qwen3-8B", "v5e:2x2", data=1, expert=1, tensor=4, batch=16),
    Case("Qwen3-8B", "v6e:8x8", data=16, expert=1, tensor=4, batch=256),
    Case("Qwen3-8B", "v5e:16x16", data=64, expert=1, tensor=4, batch=1024),
    Case("Qwen3.5-397B-A17B", "v5e:16x16", data=2, expert=16, tensor=8, batch=256),
    Case("Qwen3-235B-A22B", "v5e:16x16", data=2, expert=16, tensor=8, batch=256),
    Case("Qwen3.5-397B-A17B", "v6e:8x8", data=1, expert=8, tensor=8, batch=64),
    Case("Qwen3-235B-A22B", "v6e:8x8", data=1, expert=8, tensor=8, batch=64),
    Case("Qwen3.5-397B-A17B+MTP", "v5e:16x16", data=2, expert=16, tensor=8, batch=256, drafter="mtp"),
)
QUICK = (Case("tiny", "v5e:2x2", data=1, expert=2, tensor=2, batch=4, context=256),)
