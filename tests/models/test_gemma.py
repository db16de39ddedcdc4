"""Gemma 3's config in both spellings; its logits are checked with the other families' (test_qwen.py)."""

import pytest

from spec_jax.models import gemma_config
from spec_jax.models.qwen_config import ATTENTION, WINDOW

OLD = {
    "model_type": "gemma3_text",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 9,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
ROPES = {
    WINDOW: {"rope_type": "default", "rope_theta": 1e4},
    ATTENTION: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
NEW = {k: v for k, v in OLD.items() if not k.startswith("rope")} | {"rope_parameters": ROPES}


def test_both_spellings_are_the_same():
    config = gemma_config.from_hf(OLD)
    assert config == gemma_config.from_hf(NEW)
    assert config.layer_types == (*[WINDOW] * 5, ATTENTION, WINDOW) and config.period == 7
    assert config.rope_of(9).theta == 1e4 and config.rope_of(None).factor == 8.0 and config.attention_scale == 1 / 16


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"layer_types": [WINDOW]}, "layer_types"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_what_would_be_another_model_is_refused(change, name):
    with pytest.raises(ValueError, match=name):
        gemma_config.from_hf(OLD | change)
