"""Small random Qwen models: of ours, and of transformers with the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.models import gemma_config, qwen_tensors
from spec_jax.models.qwen import Qwen, QwenParams
from spec_jax.models.qwen_config import QwenConfig
from spec_jax.models.qwen_shapes import required_tensors
from spec_jax.tree import Tree

VOCAB = 97

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
SHARED = {"shared_expert_intermediate_size": 20}

FAMILIES = {
    "Qwen3": {},
    "Qwen3Moe": EXPERTS,
    "Qwen3Next": DELTA | EXPERTS | SHARED,
    "Qwen3_5": DELTA,
    "Qwen3_5Moe": DELTA | EXPERTS | SHARED,
}
GEMMA = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 5,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    },
}
FAMILIES["Gemma3"] = GEMMA


def gemma() -> QwenConfig:
    """A small Gemma's config."""
    return gemma_config.from_hf({**SIZES, **GEMMA, "model_type": gemma_config.MODEL_TYPE})


def theirs(kind: str, **changes):
    """A random transformers model whose gates run over their whole range, and whose norms are not trivial."""
    transformers = pytest.importorskip("transformers", reason="parity with transformers needs it")
    torch = pytest.importorskip("torch", reason="parity with transformers needs torch")
    if not hasattr(transformers, f"{kind}ForCausalLM"):
        pytest.skip(f"this transformers has no {kind}")
    torch.manual_seed(0)
    fields = SIZES | FAMILIES[kind] | changes
    if kind == "Qwen3_5Moe":
        del fields["intermediate_size"]
    text = kind in ("Gemma3", "Qwen3_5", "Qwen3_5Moe")
    config = getattr(transformers, f"{kind}TextConfig" if text else f"{kind}Config")(**fields)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith("A_log"):
                parameter.uniform_(np.log(0.01), np.log(16))
            elif name.endswith("dt_bias"):
                parameter.uniform_(-6, 2)
            elif name.endswith("bias"):
                parameter.normal_(std=0.2)
    return model


def ours(model) -> tuple[Qwen, QwenParams]:
    fields = model.config.to_dict()
    config = (gemma_config if fields["model_type"] == gemma_config.MODEL_TYPE else QwenConfig).from_hf(fields)
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    return Qwen(config), qwen_tensors.from_tensors(config, tensors)


def their_logits(model, tokens):
    import torch

    with torch.inference_mode():
        return model(torch.tensor(np.asarray(tokens))).logits.numpy()


HYBRID = QwenConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    layer_types=("linear_attention", "full_attention", "linear_attention"),
    sparse=(True, False, True),
    intermediate_size=40,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_conv_kernel_dim=4,
    partial_rotary_factor=0.5,
    output_gate=True,
    offset_norms=True,
)


def random_tensors(config: QwenConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Tensors whose logits are lively and whose decays run from almost none to almost all."""
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith("A_log"):
            return rng.uniform(np.log(0.01), np.log(16), shape)
        if name.endswith("dt_bias"):
            return rng.uniform(-6, 2, shape)
        if "conv1d" in name:
            return rng.uniform(-0.5, 0.5, shape)
        if "norm" in name.rsplit(".", 2)[-2]:
            offset = config.offset_norms and "linear_attn" not in name
            return rng.normal(0 if offset else 1, 0.1, shape)
        return rng.normal(0, 1.5 * shape[-1] ** -0.5, shape)

    return {name: draw(name, shape).astype(np.float32) for name, shape in required_tensors(config).items()}


def small(config: QwenConfig = HYBRID, seed: int = 0, **options) -> tuple[Qwen, QwenParams]:
    return Qwen(config, **options), qwen_tensors.from_tensors(config, random_tensors(config, seed))


score = jax.jit(Qwen.score, static_argnums=(0,))
prefill = jax.jit(Qwen.prefill, static_argnums=0)
commit = jax.jit(Qwen.commit, static_argnums=0)
materialize = jax.jit(Qwen.materialize, static_argnums=0)


def tree_of(tokens, parents) -> Tree:
    tokens = jnp.asarray(tokens, jnp.int32)
    return Tree(tokens, jnp.broadcast_to(jnp.asarray(parents), tokens.shape), jnp.ones(tokens.shape, bool))


def chain_of(tokens) -> Tree:
    return tree_of(tokens, np.arange(-1, np.asarray(tokens).shape[1] - 1))


def path_of(parents, node) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path
